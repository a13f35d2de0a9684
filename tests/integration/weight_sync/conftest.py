"""A trainer and real vLLM engines, each a Ray actor, for tests of weight sync."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from rlhf_api import RuntimeConfig
from rlhf_api.roles import ModelSource, RandomModel
from rlhf_api.runtime_config import SyncPath
from rlhf_runtime.engines.vllm_engine import EngineSettings, Sampling, VLLMEngine
from rlhf_runtime.models import materialize
from rlhf_runtime.weight_sync import SendReport, SyncReport, sync_weights
from rlhf_runtime.weight_sync.buckets import Bucket
from rlhf_runtime.weight_sync.client import EngineCall
from rlhf_runtime.weight_sync.pipeline import Wait
from rlhf_runtime.weight_sync.verify import checksum
from rlhf_runtime.workers.rollout import RolloutWorker
from torch.distributed.tensor import DTensor, distribute_tensor

# Workers cannot import a file of tests by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

PROMPTS = [[10, 20, 30], [40, 50, 60, 70], [5] * 11]
LONG = [list(torch.randint(2, 90, (200,), generator=torch.Generator().manual_seed(0)).tolist())]
GREEDY = Sampling(temperature=0.0, max_tokens=16, stop_token_ids=(1,))
RANKS = 2
BUCKET = 80_000
"""Bytes: a sync of the tests' model takes several buckets, and some layers are cut between two."""


def source(seed: int, tied: bool) -> ModelSource:
    """A model so peaked that two seeds never agree on a greedy continuation."""
    config = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.4,
        "tie_word_embeddings": tied,
    }
    return ModelSource(random=RandomModel(architecture="qwen2", config=config, seed=seed))


class ProbedRollout(RolloutWorker):
    """A rollout worker that can be looked into and started again on another model."""

    def __init__(self, config: RuntimeConfig) -> None:
        # vLLM takes its process-wide state down with the first engine that goes.
        self._kept: list[VLLMEngine] = getattr(self, "_kept", [])
        super().__init__(config)
        self._kept.append(self._engine)

    def restart(self, config: RuntimeConfig) -> None:
        self.__init__(config)

    def sample(self, prompts: list[list[int]], sampling: Sampling, version: int) -> list[tuple[list[int], list[float]]]:
        responses = self._engine.generate(prompts, list(range(len(prompts))), sampling, version)
        return [(response.token_ids, response.log_probs) for response in responses]

    def fresh(self, folder: str, settings: EngineSettings) -> tuple[list[list[int]], dict[str, int]]:
        """Greedy tokens and readable parameters of an engine that loads a folder itself."""
        engine = VLLMEngine(Path(folder), settings)
        self._kept.append(engine)
        tokens = [response.token_ids for response in engine.generate(PROMPTS, [0, 1, 2], GREEDY, 0)]
        return tokens, self._checksums(engine)

    def parameters(self) -> dict[str, int]:
        return self._checksums(self._engine)

    def cached_tokens(self) -> int:
        """Tokens of the long prompt that are found in the prefix cache."""
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        output = self._engine.llm.generate({"prompt_token_ids": LONG[0]}, parameters, use_tqdm=False)[0]
        return output.num_cached_tokens or 0

    def refuse_reset(self, refuse: bool) -> None:
        if refuse:
            self._engine.llm.reset_prefix_cache = lambda *_, **__: False
        else:
            vars(self._engine.llm).pop("reset_prefix_cache", None)

    def unsupported(self, settings: EngineSettings, cache: str) -> None:
        """Start an engine on heads of a size that vLLM has no CPU kernel for."""
        config = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
        model = ModelSource(random=RandomModel(architecture="qwen2", config=config))
        VLLMEngine(materialize(model, Path(cache)), settings)

    @staticmethod
    def _checksums(engine: VLLMEngine) -> dict[str, int]:
        parameters = engine.llm.apply_model(lambda model: dict(model.named_parameters()))[0]
        return {name: checksum(tensor) for name, tensor in parameters.items()}


class Trainer:
    """Stands for a rank of the policy, with ways to go wrong."""

    def join(self, rank: int, folder: str) -> None:
        self.rank = rank
        store = torch.distributed.FileStore(folder + "/ranks", RANKS)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    def connect(
        self,
        model: ModelSource,
        cache: str,
        engines: list[Any],
        workers: int,
        path: SyncPath,
        device: str,
        sharded: bool,
    ) -> None:
        from rlhf_runtime.weight_sync.sender import WeightSender
        from torch.distributed.fsdp import fully_shard

        self.network = self._load(materialize(model, Path(cache))).to(device)
        self.sent = copy.deepcopy(self.network)
        if sharded:
            for module in [*self.sent.model.layers, self.sent]:
                fully_shard(module)
        wrapped = torch.nn.ModuleDict({"network": self.sent, "value_head": torch.nn.Linear(2, 2)})
        if hasattr(self, "sender"):
            self.sender.close()
        self.sender = WeightSender(
            wrapped, "network.", path, engines, self.rank, workers_per_engine=workers, host="127.0.0.1"
        )

    def load(self, model: ModelSource, cache: str) -> str:
        """Take on the weights of another model and say where they lie."""
        folder = materialize(model, Path(cache))
        self.network.load_state_dict(self._load(folder).state_dict())
        with torch.no_grad():
            for new, old in zip(self.network.parameters(), self.sent.parameters(), strict=True):
                sharded = isinstance(old, DTensor)
                old.copy_(distribute_tensor(new.detach(), old.device_mesh, old.placements) if sharded else new)
        return str(folder)

    def export(self, model: ModelSource, cache: str) -> str:
        """Write another model as the policy's engine does, and say where; all ranks call it."""
        from rlhf_runtime.engines.torch_engine import TorchEngine
        from rlhf_runtime.hugging_face import Trained

        folder = Path(cache) / "export"
        engine = TorchEngine(
            materialize(model, Path(cache)), head="lm", device=torch.device("cpu"), micro_batch_tokens=512
        )
        engine.export(folder, Trained(step=0))
        return str(folder)

    def send_weights(self, afresh: bool) -> Any:
        return self.sender.send(afresh)

    def send_wrongly(self, afresh: bool, how: str) -> Any:
        """A send over a transport that goes wrong on the way, or of a source that leaves something out."""
        if afresh:
            self.sender.close()
        self.sender._client.restart()
        transfer, client, source = self.sender._joined(), self.sender._client, self.sender._source
        start, begin, parameters = transfer.start, client.begin, source._parameters
        begin_init = client.begin_init

        lost = {"model.layers.0.self_attn.k_proj.bias", "model.norm.weight"}

        def flip(bucket: Bucket) -> Wait:
            for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
                if spec.name == "model.layers.1.mlp.up_proj.weight":
                    transfer.slots[bucket.slot][offset + 5] ^= 4
            return start(bucket)

        def bring_without(bucket: Bucket) -> Wait:
            """Bring engines what lay in their buffers already, and not what is lost."""
            for spec, offset in zip(bucket.specs, bucket.offsets, strict=True):
                if how == "nothing moved" or spec.name in lost:
                    transfer.slots[bucket.slot][offset : offset + spec.bytes] = 1
            return start(bucket)

        def keep(step: str, info: Any = None) -> EngineCall:
            return EngineCall(step, [], client) if step == "update_weights" else begin(step, info)

        def misname(info: dict[str, Any]) -> EngineCall:
            return begin_init(info | {"names": ["model.layers.9.nothing", *info["names"][1:]]})

        def stop(bucket: Bucket) -> Wait:
            if bucket is transfer.plan.buckets[2]:
                raise RuntimeError("the memory is gone")
            return start(bucket)

        def without(*left_out: str) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
            return lambda: ((name, value) for name, value in parameters() if name not in left_out)

        match how:
            case "nothing moved" if self.sender._path.transport == "shm":
                client.begin = keep
            case "nothing moved" | "lost":
                transfer.start = bring_without
            case "flipped":
                transfer.start = flip
            case "engine fails":
                client.begin_init = misname
            case "sender fails":
                transfer.start = stop
            case "norm left out":
                source._parameters = without("model.layers.1.input_layernorm.weight")
            case "part left out":
                source._parameters = without("model.layers.0.self_attn.k_proj.weight")
        try:
            # The plan, from which something is left out, and what engines know of it are made when they are joined.
            return self.sender.send(afresh="left out" in how or how == "engine fails")
        finally:
            transfer.start, client.begin, source._parameters = start, begin, parameters
            client.begin_init = begin_init
            if "left out" in how:
                self.sender.close()

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        return [self._continue(prompt) for prompt in prompts]

    @torch.no_grad()
    def log_probs(self, prompt: list[int], response: list[int], temperature: float) -> list[float]:
        logits = self.network(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        every = (logits / temperature).log_softmax(-1)
        return every[range(len(response)), response].tolist()

    def _continue(self, prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + GREEDY.max_tokens and tokens[-1] != 1:
            tokens.append(int(self.network(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    @staticmethod
    def _load(folder: Path) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class Group:
    """Stands for a RayWorkerGroup: every method on every actor, answers as a list."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        return lambda *args: ray.get([getattr(actor, name).remote(*args) for actor in self.actors])


class WrongPolicy:
    """A policy group whose sends go wrong so many times."""

    def __init__(self, trainer: Group, how: str, times: int) -> None:
        self.trainer, self.how, self.times = trainer, how, times

    def send_weights(self, afresh: bool) -> list[SendReport]:
        self.times -= 1
        return self.trainer.send_weights(afresh) if self.times < 0 else self.trainer.send_wrongly(afresh, self.how)


class Stage:
    """A trainer of two ranks, of which the first can be alone, and engines."""

    PROMPTS = PROMPTS
    LONG = LONG
    GREEDY = GREEDY

    def __init__(
        self, cache: Path, engines: int, device: str, transport: str, tensor_parallel: int = 1, **resources: float
    ) -> None:
        self.cache, self.device, self.transport, self.tied = str(cache), device, transport, False
        self.tensor_parallel = tensor_parallel
        self.ranks = Group([ray.remote(**resources)(Trainer).remote() for _ in range(RANKS)])
        joining = [actor.join.remote(rank, self.cache) for rank, actor in enumerate(self.ranks.actors)]
        rollout = ray.remote(**resources)(ProbedRollout)
        self.rollout = Group([rollout.remote(self.config()) for _ in range(engines)])
        ray.get(joining)
        self.version = 0

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings.of(self.config())

    def prepare(self, transport: str, tied: bool) -> None:
        """Engines on the weights of seed 0, joined to the trainer."""
        if (transport, tied) != (self.transport, self.tied):
            self.transport, self.tied, self.version = transport, tied, 0
            self.rollout.restart(self.config())
        self.connect(sharded=False)

    def connect(self, sharded: bool, verify: bool = True) -> None:
        """Join all ranks of a sharded policy, or the first alone."""
        self.trainer = Group(self.ranks.actors[: RANKS if sharded else 1])
        path = self.config().weight_sync.model_copy(update={"verify": verify})
        cache = self.cache + "/models"
        workers = self.tensor_parallel
        self.trainer.connect(source(0, self.tied), cache, self.rollout.actors, workers, path, self.device, sharded)

    def load(self, seed: int) -> str:
        """Give the trainer the weights of a seed and say where they lie."""
        return self.trainer.load(source(seed, self.tied), self.cache + "/models")[0]

    def export(self, seed: int) -> str:
        """A folder that the policy's engine wrote, with the weights of a seed."""
        return self.ranks.export(source(seed, self.tied), self.cache + "/models")[0]

    def config(self) -> RuntimeConfig:
        group = {"name": "all", "roles": ["policy", "rollout"], "workers": 1, "device": self.device, "gpusPerWorker": 0}
        policy = source(0, self.tied).model_dump(by_alias=True)
        return RuntimeConfig.parse(
            {
                "schemaVersion": 1,
                "name": "sync",
                "runDir": self.cache,
                "seed": 3,
                "models": dict.fromkeys(("policy", "critic", "reference"), policy),
                "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
                "data": {"prompts": {"builtin": "arithmetic"}, "maxPromptLength": 224, "maxResponseLength": 16},
                "algorithm": {"ppo": {}},
                "rollout": {
                    "temperature": 0.7,
                    "gpuMemoryUtilization": 0.3,
                    "tensorParallelSize": self.tensor_parallel,
                },
                "engines": 2,
                "training": {
                    "steps": 1,
                    "policyOptimizer": {},
                    "criticOptimizer": {},
                    "microBatchTokens": 512,
                    "dtype": "float32",
                    "activationCheckpointing": False,
                },
                "groups": [{**group, "bundle": {"CPU": 1}, "strategy": "PACK", "fallback": []}],
                "weightSync": {
                    "transport": self.transport,
                    "reason": "one node",
                    "bucketBytes": BUCKET,
                    "verify": True,
                    "timeoutSeconds": 60,
                },
                "pythonPath": [],
                "observability": {},
                "checkpoint": None,
                "localNodes": [],
            }
        )

    def wrong(self, how: str, times: int) -> WrongPolicy:
        """The policy, whose next sends go wrong."""
        return WrongPolicy(self.trainer, how, times)

    def sync(self, policy: Any = None) -> SyncReport:
        self.version += 1
        return sync_weights(policy or self.trainer, self.rollout, self.version)

    def greedy(self, prompts: list[list[int]] = PROMPTS) -> list[list[list[int]]]:
        """Greedy tokens of each engine."""
        return [[tokens for tokens, _ in engine] for engine in self.rollout.sample(prompts, GREEDY, self.version)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def stage(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("sync"), 2, "cpu", "shm", num_cpus=1)


@pytest.fixture(scope="module")
def spread(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """One engine of two workers."""
    return Stage(tmp_path_factory.mktemp("spread"), 1, "cpu", "gloo", tensor_parallel=2, num_cpus=0)


@pytest.fixture
def on_gpu(cluster: None, tmp_path: Path) -> Stage:
    """One engine beside its trainer on a GPU."""
    return Stage(tmp_path, 1, "cuda", "ipc", num_cpus=1, num_gpus=0.3)
