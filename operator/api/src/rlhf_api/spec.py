"""The spec of an RLHFJob."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.algorithm import Algorithm
from rlhf_api.base import ApiModel, DnsLabel
from rlhf_api.checkpoint import Checkpoint
from rlhf_api.data import Data
from rlhf_api.placement import Placement
from rlhf_api.pools import NodePool
from rlhf_api.rewards import Reward
from rlhf_api.roles import Models
from rlhf_api.training import Observability, Rollout, Training, WeightSync


class Storage(ApiModel):
    """A volume of models, data or checkpoints."""

    name: DnsLabel
    """Its name. On this machine `rlhf run --mount NAME=DIR` stands a folder in its place."""
    persistent_volume_claim: DnsLabel
    """The claim that is mounted on a cluster."""
    mount_path: Annotated[str, Field(pattern="^/")]
    """Where pods see it."""
    read_only: bool = False
    """Mount it read-only."""


class Code(ApiModel):
    """Python that is put on the path of the runtime, so that reward functions need no image of their own."""

    config_map: DnsLabel
    """A ConfigMap of modules. On this machine a folder of that name beside the manifest."""


class RLHFJobSpec(ApiModel):
    """One training job."""

    planned: ClassVar[frozenset[str]] = frozenset(
        {
            "rayVersion",
            "suspend",
            "backoffLimit",
            "infrastructureBackoffLimit",
            "activeDeadlineSeconds",
            "preRunningDeadlineSeconds",
            "ttlSecondsAfterFinished",
        }
    )

    image: str | None = None
    """The runtime's image. Ignored on this machine."""
    models: Models
    """The models."""
    rewards: Annotated[list[Reward], Field(min_length=1)]
    """The terms of the reward, added up."""
    data: Data
    """The prompts."""
    algorithm: Algorithm
    """The algorithm."""
    rollout: Rollout = Rollout()
    """Sampling."""
    training: Training
    """Steps and optimizers."""
    node_pools: Annotated[list[NodePool], Field(min_length=1)]
    """The machines."""
    placement: Placement | None = None
    """Roles to pools. Default: every role that the algorithm needs in one group on the first pool."""
    weight_sync: WeightSync = WeightSync()
    """How new weights reach the rollout engines."""
    checkpoint: Checkpoint | None = None
    """Checkpoints to go on from. Default: none are taken."""
    storage: list[Storage] = Field(default_factory=list)
    """Volumes."""
    code: Code | None = None
    """Modules of your own."""
    observability: Observability = Observability()
    """What is recorded."""
