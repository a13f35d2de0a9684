"""What one pass over a job knows, and the decision that it makes of it. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from rlhf_api import FieldError
from rlhf_api.status import MAX_FAILURES, ConditionType, Failure, FailureKind, Phase, RLHFJobStatus

from rlhf_operator import conditions
from rlhf_operator.conditions import is_true, with_condition
from rlhf_operator.feasibility import Feasibility
from rlhf_operator.manifests import Rendered
from rlhf_operator.observe import ClusterView, DriverView, JobView, PodView, format_time
from rlhf_operator.terms import Terms

SOON, LATER = 2.0, 60.0
"""Seconds to the next look at a job: at least, and at most while it waits for something."""


@dataclass(frozen=True)
class Patience:
    """How long things may take."""

    job_api_seconds: float = 300
    """How long Ray's job API may stay away."""
    retry_seconds: float = 10
    """Delay before a second try."""
    follow_seconds: float = 30
    """Between two looks at a job that trains."""


@dataclass(frozen=True)
class Seen:
    """All that one pass knows about a job."""

    job: JobView
    now: datetime
    terms: Terms
    problems: tuple[FieldError, ...] | None = None
    """What keeps the spec from being run; None if it was not planned again."""
    rendered: Rendered | None = None
    """The objects of the next cluster, if it was planned again."""
    cluster: ClusterView | None = None
    """The RayCluster that the status names, whoever owns it; absent by a fresh look, not by memory."""
    others: tuple[ClusterView, ...] = ()
    """The job's other RayClusters."""
    leftovers: tuple["Leftover", ...] | None = ()
    """What is left of a cluster that is gone; None where that cannot be looked at."""
    lingering: tuple[PodView, ...] | None = ()
    """Pods of a cluster that is gone which may still run; None where they cannot be looked at."""
    pods: tuple[PodView, ...] | None = None
    """The cluster's pods, where they were looked at."""
    driver: DriverView | None = None
    """Ray's word about the current try, where it was asked."""
    silent_since: datetime | None = None
    """When this process first found Ray's job API silent since it last answered; None where it did not."""
    feasibility: Feasibility | None = None
    """Whether nodes fit, where it was looked at."""
    trouble: str | None = None
    """Why the last action was refused."""
    blind: str = ""
    """Why something could not be looked at; empty if everything could."""
    told: datetime | None = None
    """When its status was last written, if that was by this process."""

    @property
    def whole(self) -> bool:
        """Whether the job's own cluster has its head and all workers that it cannot do without.

        Where a group scales, the pods say so; without a look at them a job that trains has what it was told to have.
        """
        cluster = self.ours
        if cluster is None or not cluster.ready_by_sums:
            return False
        if self.pods is not None:
            return cluster.ready_by_pods(self.pods)
        return not cluster.scales or all(is_true(self.job.status, kind) for kind in ("ClusterReady", "Training"))

    @property
    def ours(self) -> ClusterView | None:
        """The current cluster, if it is the job's own."""
        return self.cluster if self.cluster and self.cluster.owner == self.job.uid else None


@dataclass(frozen=True)
class MakeCluster:
    """Apply the objects of a cluster."""

    number: int


@dataclass(frozen=True)
class DropCluster:
    """Delete a RayCluster."""

    cluster: ClusterView


@dataclass(frozen=True)
class Leftover:
    """An object that a cluster was made of, and that it left behind. As an action: delete it."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True)
class Submit:
    """Submit the driver to Ray."""

    submission_id: str


@dataclass(frozen=True)
class DropJob:
    """Delete the job."""


Action = MakeCluster | DropCluster | Leftover | Submit | DropJob


@dataclass(frozen=True)
class Decision:
    """What to tell, then what to do, then when to look again."""

    status: RLHFJobStatus
    actions: tuple[Action, ...] = ()
    again_seconds: float | None = None
    """None: on the next event or resync."""


@dataclass
class Draft:
    """A decision in the making."""

    seen: Seen
    patience: Patience
    status: RLHFJobStatus
    actions: list[Action] = field(default_factory=list)
    again: float | None = None

    def tell(self, kind: ConditionType, holds: bool | None, reason: str, message: str) -> None:
        """Set a condition."""
        generation = self.seen.job.generation
        self.status = with_condition(self.status, kind, holds, reason, message, generation, self.seen.now)

    def set(self, **fields: object) -> None:
        """Set fields of the status."""
        self.status = self.status.model_copy(update=fields)

    def look_again(self, seconds: float) -> None:
        """Look at the job again after so many seconds, or earlier."""
        seconds = max(seconds, 0.1)
        self.again = seconds if self.again is None else min(self.again, seconds)

    @property
    def terms(self) -> Terms:
        """The job's terms."""
        return self.seen.terms

    def rest(self, seconds: float) -> bool:
        """Whether the status was written within so many seconds: then it stays, and the job is looked at after them."""
        left = seconds - (self.seen.now - self.seen.told).total_seconds() if self.seen.told else 0.0
        if left <= 0:
            return False
        self.status = self.seen.job.status
        self.look_again(left)
        return True

    def drop(self, clusters: Iterable[ClusterView]) -> None:
        """Delete clusters, but for those that go already."""
        self.actions += [DropCluster(cluster) for cluster in clusters if not cluster.deleting]

    def end_try(self) -> None:
        """Want the current try no longer."""
        self.set(submission_id=None, training_time=None, unreachable_since=None)

    def give_up_cluster(self) -> None:
        """Want the current cluster no longer, and delete it."""
        self.drop([self.seen.ours] if self.seen.ours else [])
        self.set(ray_cluster=None, try_=None, pools=[], pool_summary=None)

    def count(self, kind: FailureKind, reason: str, message: str) -> None:
        """Note a failure, and count it against its limit."""
        status = self.status
        counter = {"Program": "program_failures", "Infrastructure": "infrastructure_failures"}[kind]
        failure = Failure(
            kind=kind,
            cluster=status.cluster or 1,
            try_=status.try_ or 0,
            reason=reason,
            message=message,
            time=format_time(self.seen.now),
            step=status.progress.step if status.progress else None,
        )
        failures = [*status.failures, failure][-MAX_FAILURES:]
        self.set(**{counter: (getattr(status, counter) or 0) + 1}, failures=failures)

    def finish(self, phase: Phase, reason: str, message: str) -> None:
        """The end: nothing is wanted any more, and nothing of the job runs on."""
        kind: ConditionType = "Succeeded" if phase == "Succeeded" else "Failed"
        self.end_try()
        self.give_up_cluster()
        self.drop(self.seen.others)
        self.tell("ClusterReady", False, conditions.FINISHED, "The job has ended, and its cluster goes.")
        self.tell("Training", False, conditions.FINISHED, "The job has ended.")
        self.tell(kind, True, reason, message)
        self.set(phase=phase, message=message, completion_time=format_time(self.seen.now))
        self.look_again(SOON)

    def waits_for(self, message: str) -> None:
        """Set phase and message of a job that waits: it trains on, or makes up for a failure, or begins."""
        training = is_true(self.status, "Training")
        again = self.status.phase in ("Training", "Restarting")
        self.set(phase="Training" if training else "Restarting" if again else "Provisioning", message=message)
