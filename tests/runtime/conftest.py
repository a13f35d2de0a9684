from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rlhf_api import RuntimeConfig

TINY = {
    "architecture": "qwen2",
    "config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    },
}


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RuntimeConfig]:
    """Makes a RuntimeConfig of a tiny job on one CPU, with these fields of its own, named as in JSON."""
    folder: Path = tmp_path_factory.mktemp("run")

    def make(**fields: Any) -> RuntimeConfig:
        roles = ["policy", "critic", "reference", "rollout", "reward"]
        group = {"name": "all", "roles": roles, "workers": 1, "device": "cpu", "gpusPerWorker": 0}
        document = {
            "schemaVersion": 1,
            "name": "tiny",
            "runDir": str(folder),
            "seed": 0,
            "models": {role: {"random": TINY} for role in ("policy", "critic", "reference")},
            "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
            "data": {"prompts": {"builtin": "arithmetic"}, "maxPromptLength": 8, "maxResponseLength": 8},
            "algorithm": {"ppo": {}},
            "rollout": {},
            "training": {
                "steps": 12,
                "policyOptimizer": {},
                "criticOptimizer": {},
                "microBatchTokens": 512,
                "dtype": "float32",
                "activationCheckpointing": False,
            },
            "groups": [{**group, "bundle": {"CPU": 1}, "strategy": "PACK", "fallback": []}],
            "weightSync": {
                "transport": "shm",
                "reason": "one node",
                "bucketBytes": 1024,
                "verify": True,
                "timeoutSeconds": 60,
            },
            "engines": 1,
            "pythonPath": [],
            "observability": {},
            "checkpoint": None,
            "localNodes": [],
        }
        return RuntimeConfig.parse(document | fields)

    return make


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are not worth a second one
    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_peaked(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes the folder of a tiny qwen2 with these fields in its config.

    Its next-token distributions are peaked and hang on positions: near-uniform ones would always agree.
    """
    import torch
    from rlhf_api.roles import ModelSource, RandomModel
    from rlhf_runtime.models import load_tokenizer, materialize
    from transformers import AutoModelForCausalLM

    def make(**fields: Any) -> Path:
        cache = tmp_path_factory.mktemp("models")
        config = {**TINY["config"], "num_hidden_layers": 2, **fields}
        made = materialize(ModelSource(random=RandomModel(architecture="qwen2", config=config)), cache)
        network = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(25 if parameter.dim() == 2 else 1)
        network.save_pretrained(cache / "peaked")
        load_tokenizer(made).save_pretrained(cache / "peaked")
        return cache / "peaked"

    return make
