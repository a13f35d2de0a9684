"""The spec of an RLHFJob."""

from typing import Annotated, Literal

from pydantic import Field

from rlhf_api.algorithm import Algorithm
from rlhf_api.base import ApiModel, DnsLabel, DnsSubdomain, Integer
from rlhf_api.checkpoint import Checkpoint
from rlhf_api.data import Data
from rlhf_api.placement import Placement
from rlhf_api.pods import EnvVar, Head, LocalObjectReference, RayClusterMetadata
from rlhf_api.pools import NodePool
from rlhf_api.rewards import Reward
from rlhf_api.roles import Models
from rlhf_api.training import Observability, Rollout, Training, WeightSync


class Storage(ApiModel):
    """A volume of models, data or checkpoints."""

    name: DnsLabel
    """Its name. On this machine `rlhf run --mount NAME=DIR` stands a folder in its place."""
    persistent_volume_claim: DnsSubdomain
    """The claim that is mounted on a cluster."""
    mount_path: Annotated[str, Field(pattern="^/")]
    """Where pods see it."""
    read_only: bool = False
    """Mount it read-only."""


class Code(ApiModel):
    """Python that is put on the path of the runtime, so that reward functions need no image of their own."""

    config_map: DnsSubdomain
    """A ConfigMap of modules. On this machine a folder of that name beside the manifest."""


class RLHFJobSpec(ApiModel):
    """One training job."""

    image: str | None = None
    """The runtime's image. Ignored on this machine."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the image is pulled. Default: Kubernetes' own. Ignored on this machine."""
    image_pull_secrets: Annotated[list[LocalObjectReference], Field(max_length=16)] = Field(default_factory=list)
    """Secrets to pull it with. Ignored on this machine."""
    ray_version: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$", max_length=32)] = "2.60.0"
    """Ray's version in the image, which KubeRay asks for. Ignored on this machine."""
    suspend: bool = False
    """Hold the job: its pods go, and it resumes from its newest checkpoint. Ignored on this machine."""
    models: Models
    """The models."""
    rewards: Annotated[list[Reward], Field(min_length=1, max_length=64)]
    """The terms of the reward, added up."""
    data: Data
    """The prompts."""
    algorithm: Algorithm
    """The algorithm."""
    rollout: Rollout = Rollout()
    """Sampling."""
    training: Training
    """Steps and optimizers."""
    node_pools: Annotated[list[NodePool], Field(min_length=1, max_length=64)]
    """The machines."""
    placement: Placement | None = None
    """Roles to pools. Default: every role that the algorithm needs in one group on the first pool, with a worker for
    each of its GPUs, or one where it has none."""
    weight_sync: WeightSync = WeightSync()
    """How new weights reach the rollout engines."""
    checkpoint: Checkpoint | None = None
    """Checkpoints to go on from. Default: none are taken."""
    storage: Annotated[list[Storage], Field(max_length=64)] = Field(default_factory=list)
    """Volumes."""
    code: Code | None = None
    """Modules of your own."""
    observability: Observability = Observability()
    """What is recorded."""
    head: Head = Head()
    """Ray's head, which runs the driver. Ignored on this machine."""
    ray_cluster: RayClusterMetadata = RayClusterMetadata()
    """Labels and annotations of the RayCluster. Ignored on this machine."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = Field(default_factory=list)
    """Variables of all pods. Ignored on this machine, where the shell's own hold."""
    backoff_limit: Annotated[Integer, Field(ge=0, le=1_000_000)] = 3
    """Tries after ones that the program ended by failing. Ignored on this machine."""
    infrastructure_backoff_limit: Annotated[Integer, Field(ge=0, le=1_000_000)] = 3
    """Tries after ones that lost a pod, a node or the cluster. Ignored on this machine."""
    active_deadline_seconds: Annotated[Integer, Field(ge=1, le=2**31 - 1)] | None = None
    """Seconds after which a job that has not finished fails, suspended time aside. Ignored on this machine."""
    pre_running_deadline_seconds: Annotated[Integer, Field(ge=1, le=2**31 - 1)] = 1800
    """Seconds within which a cluster must be ready to train, or the job fails. Ignored on this machine."""
    ttl_seconds_after_finished: Annotated[Integer, Field(ge=0, le=2**31 - 1)] | None = None
    """Seconds after its end that the job is deleted. Default: it stays. Ignored on this machine."""
