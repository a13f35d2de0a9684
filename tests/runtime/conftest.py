from collections.abc import Callable
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
            "training": {"steps": 12, "policyOptimizer": {}, "criticOptimizer": {}, "microBatchTokens": 512},
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
