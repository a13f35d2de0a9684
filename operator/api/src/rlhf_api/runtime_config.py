"""What the planner resolves a job into: all that the runtime ever reads."""

from typing import Any, Literal, Self

from pydantic import ValidationError

from rlhf_api.algorithm import Algorithm
from rlhf_api.base import ApiModel, NonNegativeFloat, PositiveInt
from rlhf_api.checkpoint import Checkpoint
from rlhf_api.data import Data
from rlhf_api.errors import FieldError, SpecError, field_errors
from rlhf_api.placement import Strategy
from rlhf_api.pools import Device
from rlhf_api.rewards import Reward
from rlhf_api.roles import ModelSource, Role
from rlhf_api.training import DType, Observability, Optimizer, Rollout

SCHEMA_VERSION = 1
"""Raised whenever an older runtime could misread a newer config."""

PROGRESS_PORT = 8090
"""Where the driver tells its progress: `/progress` as JSON, `/metrics` for Prometheus, `/healthz`."""

DRIVER_LOG = "driver.log"
"""File of the run folder with what the drivers of all tries wrote."""

EXPORT = "model"
"""Folder of the run folder with the trained policy; hidden ones beside it, as `.model-partial`, are its writer's."""

ModelRole = Literal["policy", "critic", "reference"]
"""A role that computes with a model of its own."""

Transport = Literal["nccl", "gloo", "ipc", "shm"]
"""Broadcast by `nccl` on GPUs and `gloo` on CPU; memory shared by `ipc` on GPUs and `shm` on CPU."""


class RoleModels(ApiModel):
    """The models, each with its own source."""

    policy: ModelSource
    """The trained model."""
    critic: ModelSource | None
    """The value model's backbone; null without a critic."""
    reference: ModelSource | None
    """The frozen model of the KL term; null without a reference."""

    @property
    def by_role(self) -> dict[ModelRole, ModelSource]:
        """Those that are there."""
        models: dict[ModelRole, ModelSource | None] = {
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference,
        }
        return {role: model for role, model in models.items() if model is not None}


class WorkerGroup(ApiModel):
    """One placement group of equal bundles."""

    name: str
    """The group's name."""
    roles: list[Role]
    """Its roles."""
    workers: PositiveInt
    """Bundles: one a worker of each role; of a rollout without training roles one an engine."""
    device: Device
    """What its roles compute on."""
    gpus_per_worker: NonNegativeFloat
    """GPUs of a bundle."""
    bundle: dict[str, float]
    """Ray resources of one bundle."""
    strategy: Strategy
    """Ray's placement strategy."""
    fallback: list[Strategy]
    """Strategies to take, in this order, where the one before cannot be had."""


class LocalNode(ApiModel):
    """A Ray node to start on this machine in the place of one of a pool's nodes."""

    pool: str
    """The pool that it belongs to."""
    device: Device
    """What its roles compute on; GPUs of a `cpu` node are made up."""
    resources: dict[str, float]
    """Ray resources that it offers."""


class SyncPath(ApiModel):
    """The way that weights take, decided."""

    transport: Transport
    """How weights are moved."""
    reason: str
    """Why, in words."""
    bucket_bytes: PositiveInt
    """Bytes of the buffer that weights travel through."""
    verify: bool
    """Whether what arrived is compared with what was sent."""
    timeout_seconds: PositiveInt
    """How long a sync may take."""


class TrainingLoop(ApiModel):
    """Steps and optimizers, resolved."""

    steps: PositiveInt
    """Steps of the job."""
    policy_optimizer: Optimizer
    """The policy's optimizer."""
    critic_optimizer: Optimizer | None
    """The critic's optimizer; null without a critic."""
    micro_batch_tokens: PositiveInt
    """Most tokens of one forward pass."""
    dtype: DType
    """What the models compute in."""
    activation_checkpointing: bool
    """Whether layers are computed anew in the backward pass."""


class RuntimeConfig(ApiModel):
    """The whole input of the runtime, every default explicit."""

    schema_version: int
    """`SCHEMA_VERSION` of the planner."""
    name: str
    """The job's name."""
    run_dir: str
    """Where the run's files go."""
    seed: int
    """Seed of everything random."""
    models: RoleModels
    """Models by role."""
    rewards: list[Reward]
    """Terms of the reward."""
    data: Data
    """Prompts."""
    algorithm: Algorithm
    """Algorithm."""
    rollout: Rollout
    """Sampling."""
    training: TrainingLoop
    """Steps and optimizers."""
    groups: list[WorkerGroup]
    """Where each role runs."""
    engines: PositiveInt
    """Rollout engines. Each holds as many neighbouring bundles of its group as there are bundles an engine."""
    weight_sync: SyncPath
    """How weights reach the engines."""
    checkpoint: Checkpoint | None
    """Checkpoints, their path absolute; null takes none."""
    python_path: list[str]
    """Folders put on the path before reward functions are imported."""
    observability: Observability
    """What is recorded."""
    local_nodes: list[LocalNode] | None
    """Ray nodes to start on this machine; null joins the cluster that is there."""

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read a config as the planner wrote it.

        Raises:
            SpecError: with every problem, the schema version's first and alone: nothing else can be trusted then.
        """
        if isinstance(document, dict) and (version := document.get("schemaVersion")) != SCHEMA_VERSION:
            fix = "use an operator and a runtime image of the same release"
            raise SpecError([FieldError("schemaVersion", repr(version), str(SCHEMA_VERSION), fix)])
        try:
            return cls.model_validate(document, by_alias=True, by_name=False)
        except ValidationError as error:
            raise SpecError(field_errors(cls, error)) from None

    def group_of(self, role: Role) -> WorkerGroup:
        """The group that a role runs in."""
        return next(group for group in self.groups if role in group.roles)
