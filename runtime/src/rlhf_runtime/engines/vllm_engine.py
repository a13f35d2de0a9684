"""Generation with vLLM, in this process, with weights that come from elsewhere.

Every generation names the version of the weights that it expects; an engine that holds another, or whose weights are
being replaced, refuses.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf_api.pools import Device
from rlhf_api.runtime_config import RuntimeConfig, Transport

from rlhf_runtime.errors import InputError, ResourceError, WeightSyncError
from rlhf_runtime.memory import enough_memory
from rlhf_runtime.weight_sync.dtypes import ENGINE_DTYPES
from rlhf_runtime.weight_sync.verify import ReceivedWeights

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm import LLM

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Read by vLLM on import: one process a device, quiet, free to run on any CPU of a node that engines share, nothing
asked of or told to the network."""
GIB = 1 << 30
FIX = (
    "choose another model, change rollout.gpuMemoryUtilization or rollout.tensorParallelSize, or lower the lengths "
    "in `data`"
)
ENOUGH_MEMORY = enough_memory("rollout.gpuMemoryUtilization", FIX)
WORKERS_FAILED = "WorkerProc initialization failed"
"""All that vLLM says where a process of several could not start; the reason stands in what that one wrote."""
STDOUT = Path("/proc/self/fd/1")
"""Where this process and its children write, which is a file of Ray's."""
_ERROR = re.compile(r"(?:^|[\])] )((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE)
"""The last line of a traceback, be it behind a log line's beginning."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with."""

    device: Device
    """What it computes on."""
    transport: Transport
    """How new weights arrive, as `SyncPath.transport` names it."""
    max_model_len: int
    """Most tokens of a prompt and its response."""
    kv_cache_gib: int
    """GiB of KV cache on a CPU."""
    gpu_memory_utilization: float
    """Share of the memory of a GPU."""
    tensor_parallel_size: int = 1
    """Devices that the model is spread over, each with a process of its own."""

    @classmethod
    def of(cls, config: RuntimeConfig) -> "EngineSettings":
        """The settings that a job asks for."""
        return cls(
            device=config.group_of("rollout").device,
            transport=config.weight_sync.transport,
            max_model_len=config.data.longest_sequence,
            kv_cache_gib=config.rollout.kv_cache_gib,
            gpu_memory_utilization=config.rollout.gpu_memory_utilization,
            tensor_parallel_size=config.rollout.tensor_parallel_size,
        )


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float
    """0 takes the likeliest token."""
    max_tokens: int
    """Most tokens of a response."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and are its last."""
    top_p: float = 1.0
    """Share of the probability that the likeliest tokens are drawn from."""


@dataclass(frozen=True)
class Response:
    """One generated response of R tokens."""

    token_ids: list[int]
    """[R]."""
    log_probs: list[float]
    """[R]: of each token at the sampling temperature."""


class VLLMEngine:
    """A vLLM engine in the calling process, at version 0 once started."""

    def __init__(self, model: Path, settings: EngineSettings) -> None:
        """Load a model folder.

        Raises:
            InputError: when vLLM cannot run the model on the device.
        """
        self._llm = _start(model, settings)
        if settings.device == "cpu":
            self._llm.collective_rpc("compile_nothing")
        self._version = 0
        self._paused = False
        self.llm.update_weight_version("0")

    @property
    def llm(self) -> "LLM":
        """VLLM's own entry point, which offers the weight-transfer methods of its API."""
        return self._llm

    @ENOUGH_MEMORY
    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, version: int
    ) -> list[Response]:
        """One response a prompt, in order.

        Args:
            prompts: Token ids of B prompts.
            seeds: B seeds; a response depends on its own alone.
            sampling: How tokens are drawn.
            version: The version of the weights that the trainer allows.

        Raises:
            ResourceError: when the GPU's memory does not suffice.
            WeightSyncError: when the engine is paused or holds another version.
        """
        self._check(version)
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=seed,
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        return [_response(output.outputs[0], version) for output in outputs]

    def pause(self) -> None:
        """Refuse to generate until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Generate again."""
        self._paused = False

    def publish(self, version: int) -> None:
        """Name the weights that the engine holds now, and forget what was computed with older ones.

        Raises:
            WeightSyncError: when the engine is not paused or its prefix cache cannot be reset.
        """
        if not self._paused:
            raise WeightSyncError("rollout: got new weights while generating; expected a paused engine. Fix: pause it")
        self.forget()
        self._llm.update_weight_version(str(version))
        self._version = version

    def forget(self) -> None:
        """Empty the prefix cache.

        Raises:
            WeightSyncError: when that cannot be done.
        """
        if not self._llm.reset_prefix_cache():
            raise WeightSyncError(
                "rollout: got a prefix cache that is still in use; expected none after an update, as it holds "
                "states of older weights. Fix: wait for running requests before a sync"
            )

    def received_weights(self) -> list[ReceivedWeights]:
        """What the last update brought, one record a worker of the engine.

        Raises:
            WeightSyncError: when there was none.
        """
        records: list[ReceivedWeights] = self._llm.collective_rpc("received_weights")
        return records

    def _check(self, version: int) -> None:
        if self._paused:
            raise WeightSyncError("rollout: got a prompt while paused; expected it after the sync. Fix: resume first")
        if version != self._version:
            raise WeightSyncError(
                f"rollout: got a prompt for weight version {version}; expected {self._version}, which is here. "
                "Fix: sync the weights before generating"
            )


@ENOUGH_MEMORY
def _start(model: Path, settings: EngineSettings) -> "LLM":
    threads = max(1, torch.get_num_threads() // settings.tensor_parallel_size)
    os.environ |= ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)}
    # Imported after the environment is set, and only where an engine runs: it takes seconds.
    from transformers import AutoConfig
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    from rlhf_runtime.weight_sync.transports import ENGINE_BACKENDS, WORKER_EXTENSION

    on_cpu = settings.device == "cpu"
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    if on_cpu:
        _check_head_size(config)
    _load_architectures(config.architectures)
    written = len(_written())
    try:
        return LLM(
            str(model),
            dtype=ENGINE_DTYPES[settings.transport],
            enforce_eager=on_cpu,
            skip_tokenizer_init=True,
            max_model_len=settings.max_model_len,
            tensor_parallel_size=settings.tensor_parallel_size,
            # Left to choose, vLLM would ask Ray for more actors.
            distributed_executor_backend="mp" if settings.tensor_parallel_size > 1 else "uni",
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            kv_cache_memory_bytes=settings.kv_cache_gib * GIB if on_cpu else None,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            use_tqdm_on_load=False,
            weight_transfer_config=WeightTransferConfig(backend=ENGINE_BACKENDS[settings.transport]),
            worker_extension_cls=WORKER_EXTENSION,
        )
    except Exception as error:
        if WORKERS_FAILED in str(error):
            reason = _first_error(_written()[written:])
        elif isinstance(error, ValueError):
            reason = f"ValueError: {error}"
        else:
            raise
        # a setting that vLLM refuses is a ValueError; what else fails, such as NCCL, another try may get past
        kind = InputError if reason.startswith("ValueError") else ResourceError
        raise kind(
            f"models.policy: got {model}, with which vLLM does not start ({reason}); expected a model and a KV cache "
            f"that fit {settings.device}. Fix: {FIX}"
        ) from error


def _written() -> bytes:
    """What this process and its children have written so far, as far as that is a file."""
    return STDOUT.read_bytes() if STDOUT.is_file() else b""


def _first_error(written: bytes) -> str:
    """The first error that an engine's processes told of, and where the others are."""
    found = _ERROR.search(written.decode(errors="replace"))
    return f"{found[1] if found else 'a process of the engine failed'}; more in {STDOUT.resolve()}"


def _load_architectures(names: Sequence[str]) -> None:
    """Import the model's class here, or vllm starts a second interpreter that imports all of itself to look at it.

    It remembers what it saw in a cache folder, which a new machine or pod does not have.
    """
    from vllm import ModelRegistry

    for name in names:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _check_head_size(config: "PretrainedConfig") -> None:
    """VLLM itself fails at the first token, in words that help nobody."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    text = config.get_text_config()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if size not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
        raise InputError(
            f"models.policy: got attention heads of size {size}; expected one of {sizes}, which vLLM has for CPU. "
            "Fix: choose `hidden_size` and `num_attention_heads` whose quotient is one of them"
        )


def _response(completion: Any, version: int) -> Response:
    for span in completion.weight_versions or ():
        if span.version != str(version):
            raise WeightSyncError(
                f"rollout: got tokens of weight version {span.version}; expected {version} throughout. "
                "Fix: pause the engine during a sync"
            )
    tokens = list(completion.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=True)]
    return Response(tokens, log_probs)
