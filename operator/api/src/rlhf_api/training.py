"""The training loop's own settings: optimizers, rollouts, weight sync, what is reported."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rlhf_api.base import ApiModel, Integer, NonNegativeFloat, PositiveFloat, PositiveInt, Temperature

Beta = Annotated[float, Field(ge=0, lt=1)]

DType = Literal["float32", "bfloat16"]
"""What models compute in while they are trained; their parameters are kept as float32."""


class Optimizer(ApiModel):
    """AdamW with gradient clipping and linear warm-up."""

    learning_rate: NonNegativeFloat = 1e-6
    """Step size after warm-up; 0 trains nothing."""
    betas: list[Beta] = Field(default=[0.9, 0.999], min_length=2, max_length=2)
    """Decay of the first and second moments."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Global gradient norm above which gradients are scaled down."""
    warmup_steps: Annotated[Integer, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from 0."""


class Training(ApiModel):
    """How long and how the models are trained."""

    planned: ClassVar[frozenset[str]] = frozenset({"maxStaleness", "mode: async"})

    steps: PositiveInt
    """Steps of the job: each generates, scores, trains and syncs once."""
    mode: Literal["sync"] = "sync"
    """`sync`: every rollout uses the newest weights."""
    optimizer: Optimizer = Optimizer()
    """The policy's optimizer."""
    critic_optimizer: Optimizer | None = None
    """The critic's optimizer, for ppo alone. Default: the policy's."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of one forward pass; gradients accumulate over micro-batches."""
    dtype: DType = "float32"
    """What policy, critic and reference compute in. Parameters, gradients and the optimizer's state are kept as
    float32; log-probabilities and losses are computed in it."""
    activation_checkpointing: bool = False
    """Compute each layer anew in the backward pass: much less memory for about a third more time."""


class Rollout(ApiModel):
    """Sampling."""

    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt."""
    temperature: Temperature = 1.0
    """Sampling temperature. The trainer takes log-probabilities at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; only 1 is sound for training, since a truncated distribution is not the trainer's."""
    tensor_parallel_size: Annotated[Integer, Field(ge=1, le=1000)] = 1
    """Devices that one engine spreads its model over."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of a GPU's memory that an engine may take."""
    kv_cache_gib: PositiveInt = Field(default=1, alias="kvCacheGiB")
    """GiB of memory for an engine's KV cache on a `cpu` pool."""


class WeightSync(ApiModel):
    """How new weights reach the rollout engines."""

    method: Literal["auto", "broadcast", "ipc"] = "auto"
    """`broadcast`: over the network (NCCL, on CPU gloo); `ipc`: shared memory (CUDA IPC on GPUs), for a rollout in the
    policy's group; `auto`: as the placement asks."""
    bucket_mib: PositiveInt = Field(default=256, alias="bucketMiB")
    """Size of the buffer that weights travel through."""
    verify: Literal["checksum", "none"] = "checksum"
    """`checksum`: compare every tensor as it arrived with what was sent, and refuse parameters that were left out."""
    timeout_seconds: PositiveInt = 600
    """How long a sync may take before it counts as failed."""


class Observability(ApiModel):
    """What is recorded beside `metrics.jsonl`."""

    planned: ClassVar[frozenset[str]] = frozenset({"wandb"})

    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    prometheus: bool = False
    """Serve progress and Prometheus metrics on localhost:8090 of this machine. On a cluster they always are."""
    samples_per_step: Annotated[Integer, Field(ge=0)] = 4
    """Sampled texts that are kept a step."""
