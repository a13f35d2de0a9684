"""What the operator tells about a job."""

from dataclasses import replace
from math import isfinite
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError

from rlhf_api.base import ApiModel, Integer
from rlhf_api.errors import SpecError, field_errors, format_path

Phase = Literal["Pending", "Provisioning", "Training", "Suspended", "Restarting", "Succeeded", "Failed"]
"""Where a job is: its cluster is made in Provisioning; between two tries it is Restarting."""
ConditionType = Literal["Accepted", "PlacementFeasible", "ClusterReady", "Training", "Suspended", "Succeeded", "Failed"]
"""What is true of a job; `kubectl wait --for=condition=Succeeded` waits for one."""
FailureKind = Literal["Program", "Infrastructure"]
"""Whose limit a failure counts against: `backoffLimit`, or `infrastructureBackoffLimit`."""

MAX_FAILURES = 10
"""Failures that are kept, the newest last."""


class Condition(ApiModel):
    """A Kubernetes condition."""

    type: ConditionType
    """What it is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(pattern=r"^[A-Z][A-Za-z]*$", max_length=64)]
    """Why, in one word for programs."""
    message: str
    """Why, for people, and what to do about it."""
    last_transition_time: str
    """When `status` last changed, RFC 3339."""
    observed_generation: int
    """The generation of the spec that it was told about."""


class PoolStatus(ApiModel):
    """One node pool's pods."""

    name: str
    """The pool."""
    desired: int
    """Nodes that are wanted."""
    ready: int
    """Nodes that are ready."""


def _rounded(value: float) -> float:
    """Four significant digits of a number, which must not make the largest ones infinite."""
    rounded = float(f"{value:.4g}")
    return rounded if isfinite(rounded) else value


Measured = Annotated[float, AfterValidator(_rounded)]
"""A number to look at, of four significant digits; Prometheus has all of them."""


class Progress(ApiModel):
    """How far training is, as the driver tells it."""

    step: Integer
    """Steps done."""
    steps: Integer
    """Steps of the job."""
    reward: Measured | None = None
    """Mean reward of the last step."""
    kl: Measured | None = None
    """Mean KL to the reference of the last step, in nats."""
    tokens_per_second: Measured | None = None
    """Trained tokens a second, over the last step."""
    weight_version: Integer | None = None
    """Version of the weights that the engines hold."""
    last_checkpoint: str | None = None
    """The newest whole checkpoint."""
    eta_seconds: Integer | None = None
    """Seconds that the remaining steps will take, by the last ones."""


class Failure(ApiModel):
    """One end that was not wanted."""

    kind: FailureKind
    """Which limit it counts against."""
    cluster: int
    """Number of the cluster, from 1."""
    try_: Annotated[int, Field(alias="try")]
    """Number of the try on that cluster, from 1; 0 before the first."""
    reason: str
    """Why, in one word."""
    message: str
    """Why, for people."""
    time: str
    """When it was seen, RFC 3339."""
    step: int | None = None
    """Steps done by then, where known."""


class RLHFJobStatus(ApiModel):
    """The status subresource. Written by the operator alone, and only when it changes."""

    observed_generation: int | None = None
    """The generation of the spec that this tells about."""
    phase: Phase | None = None
    """The one word."""
    message: str | None = None
    """The one sentence."""
    conditions: list[Condition] = Field(default_factory=list)
    """What is true, one of each type."""
    gpus: int | None = None
    """GPUs of all pools together."""
    cluster: int | None = None
    """Number of the current cluster, from 1. A lost one is replaced by the next."""
    ray_cluster: str | None = None
    """Name of the current RayCluster, `<job>-<cluster>`."""
    try_: Annotated[int | None, Field(alias="try")] = None
    """Number of the current try on this cluster, from 1."""
    submission_id: str | None = None
    """Ray's id of the current try, `<job>-<cluster>-<try>`."""
    tries: int | None = None
    """Tries so far, on all clusters."""
    pools: list[PoolStatus] = Field(default_factory=list)
    """Pods of each pool."""
    pool_summary: str | None = None
    """The same in one line: `train 2/2, rollout 0/1`."""
    progress: Progress | None = None
    """How far training is."""
    program_failures: int | None = None
    """Failures that counted against backoffLimit."""
    infrastructure_failures: int | None = None
    """Failures that counted against infrastructureBackoffLimit."""
    failures: Annotated[list[Failure], Field(max_length=MAX_FAILURES)] = Field(default_factory=list)
    """The newest of them, the last one last."""
    start_time: str | None = None
    """When the job was first accepted and not suspended, RFC 3339."""
    training_time: str | None = None
    """When the current try began to train, RFC 3339."""
    unreachable_since: str | None = None
    """Since when Ray's job API has not answered, RFC 3339; a resubmission does not reset it."""
    completion_time: str | None = None
    """When the job succeeded or failed, RFC 3339."""

    @classmethod
    def read(cls, status: Any) -> Self:
        """Read a status as an API server gives it, whichever release wrote it: fields that are unknown are dropped.

        Args:
            status: the `status` of an RLHFJob; None where it has none yet.

        Raises:
            SpecError: with everything in it that cannot be read, by its path from `status`.
        """
        try:
            return cls.model_validate({} if status is None else status, by_alias=True, by_name=False, extra="ignore")
        except ValidationError as error:
            problems = field_errors(cls, error)
        whole, fix = format_path(()), "use the release of the operator that wrote it"
        paths = ("status" if each.path == whole else f"status.{each.path}" for each in problems)
        raise SpecError(replace(each, path=path, fix=fix) for each, path in zip(problems, paths, strict=True))
