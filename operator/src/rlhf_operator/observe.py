"""What is seen of a job: Kubernetes objects and Ray's answers, read into small values. Pure.

The operator keeps a view, not the object, of every RayCluster: pod templates are most of an object's bytes, and none of
them tells how the cluster fares.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from rlhf_api import SpecError
from rlhf_api.status import Progress, RLHFJobStatus

from rlhf_operator.kuberay import GROUP_LABEL, HEAD_GROUP
from rlhf_operator.manifests import CLUSTER_LABEL, JOB_LABEL
from rlhf_operator.manifests.pods import CONTAINER

Object = Mapping[str, Any]
"""A Kubernetes object."""
Key = tuple[str, str]
"""Namespace and name."""

KILL_SLACK = timedelta(seconds=10)
"""After a pod's grace: until it is killed, and by which clocks differ."""
TROUBLES = 3
"""Pods whose trouble is told, each with its own reason."""


@dataclass(frozen=True)
class JobView:
    """An RLHFJob."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    generation: int
    deleting: bool
    """Whether it is being deleted, which ends everything that it owns."""
    manifest: Object
    """The object, without its status."""
    status: RLHFJobStatus
    """What was told about it so far."""
    raw_status: Object
    """The same as it lies on the API server."""
    unreadable: str | None = None
    """Why it cannot be read, so that nothing is known of what was told; None where it can."""

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name


@dataclass(frozen=True)
class RayCondition:
    """A condition of a RayCluster."""

    status: bool
    reason: str
    message: str


@dataclass(frozen=True)
class ClusterView:
    """A RayCluster."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    owner: str | None
    """UID of the object that controls it."""
    job: str | None
    """Name of the job by its label."""
    number: int
    """Number of the cluster by its label; 0 without one."""
    created: datetime
    deleting: bool
    suspended: bool
    """Whether it is suspended, or is being: by a queue, since the operator never does so."""
    ready_workers: int
    fewest: Mapping[str, int]
    """Workers of each group without which it is not whole: fewer than it has asked for where one scales."""
    scales: bool
    """Whether a group has no fixed size, so that the sum of its workers does not tell which of them are ready."""
    head_service: str | None
    conditions: Mapping[str, RayCondition] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def head_ready(self) -> bool:
        """Whether the head takes requests."""
        return self.is_true("HeadPodReady")

    @property
    def provisioned(self) -> bool:
        """Whether all of its pods were ready at once before; it stays true when they die."""
        return self.is_true("RayClusterProvisioned")

    @property
    def wanted_workers(self) -> int:
        """Workers without which it is not whole, of all groups together."""
        return sum(self.fewest.values())

    @property
    def ready_by_sums(self) -> bool:
        """Whether its head, and as many workers as it cannot do without, are ready now."""
        return self.provisioned and self.head_ready and self.ready_workers >= self.wanted_workers

    def ready_by_pods(self, pods: Iterable["PodView"]) -> bool:
        """The same, and that each group has its share of these pods, which are all of the cluster's."""
        ready = Counter(pod.group for pod in pods if pod.ready)
        return self.ready_by_sums and all(ready[group] >= fewest for group, fewest in self.fewest.items())

    def is_true(self, condition: str) -> bool:
        """Whether a condition holds."""
        return condition in self.conditions and self.conditions[condition].status


@dataclass(frozen=True)
class PodView:
    """A pod of a cluster."""

    name: str
    group: str
    """Its node pool; `headgroup` for the head."""
    ready: bool
    trouble: str | None
    """Why it does not run, in Kubernetes' words; None where it runs, or merely starts."""
    ended: bool = False
    """Whether a container of its own ended it for good: another pod takes its place, which may end as it did."""
    over: bool = False
    """Whether all of its containers have ended, by its phase."""
    grace_ends: datetime | None = None
    """When it is killed, since it is being deleted; None where it is not."""

    def may_run(self, now: datetime) -> bool:
        """Whether processes of it may still run. On a node that is lost nobody tells that they ended: time does."""
        return not self.over and (self.grace_ends is None or now < self.grace_ends + KILL_SLACK)


@dataclass(frozen=True)
class DriverView:
    """Ray's word about the current try."""

    state: Literal["unknown", "pending", "running", "succeeded", "failed", "stopped", "unreachable"]
    """`unknown`: Ray has no such submission; `unreachable`: it did not answer."""
    message: str = ""
    """Ray's message, or why it did not answer."""
    exit_code: int | None = None
    error_type: str | None = None
    """Ray's kind of error, where the driver could not run."""
    log: str = ""
    """The end of its log, once it has ended."""
    progress: Progress | None = None
    """What its endpoint tells, while it runs."""


def job_view(obj: Object) -> JobView:
    """An RLHFJob as the API server gives it. Of a status that cannot be read it says so, and why."""
    meta, raw = obj["metadata"], obj.get("status") or {}
    unreadable = None
    try:
        status = RLHFJobStatus.read(raw)
    except SpecError as error:
        status, unreadable = RLHFJobStatus(), str(error)
    kept = {key: meta[key] for key in ("name", "namespace", "labels", "annotations") if key in meta}
    manifest = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "metadata": kept, "spec": obj.get("spec", {})}
    return JobView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        generation=meta.get("generation", 1),
        deleting="deletionTimestamp" in meta,
        manifest=manifest,
        status=status,
        raw_status=raw,
        unreadable=unreadable,
    )


def owner_of(obj: Object) -> str | None:
    """UID of the object that controls another; None where none does."""
    references = obj["metadata"].get("ownerReferences") or ()
    return next((reference["uid"] for reference in references if reference.get("controller")), None)


def cluster_view(obj: Object) -> ClusterView:
    """A RayCluster as the API server gives it."""
    meta, spec, status = obj["metadata"], obj.get("spec", {}), obj.get("status") or {}
    labels = meta.get("labels") or {}
    conditions = {condition["type"]: _ray_condition(condition) for condition in status.get("conditions") or ()}
    suspended = bool(spec.get("suspend")) or any(
        conditions[name].status for name in ("RayClusterSuspending", "RayClusterSuspended") if name in conditions
    )
    number, groups = labels.get(CLUSTER_LABEL, ""), spec.get("workerGroupSpecs") or ()
    return ClusterView(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        owner=owner_of(obj),
        job=labels.get(JOB_LABEL),
        number=int(number) if number.isdecimal() else 0,
        created=parse_time(meta["creationTimestamp"]),
        deleting="deletionTimestamp" in meta,
        suspended=suspended,
        ready_workers=status.get("readyWorkerReplicas", 0),
        fewest={group["groupName"]: group.get("minReplicas", 0) for group in groups},
        scales=any(group.get("minReplicas") != group.get("maxReplicas") for group in groups),
        head_service=(status.get("head") or {}).get("serviceName"),
        conditions=conditions,
    )


def _ray_condition(condition: Object) -> RayCondition:
    return RayCondition(
        status=condition.get("status") == "True",
        reason=condition.get("reason", ""),
        message=condition.get("message", ""),
    )


def pod_view(obj: Object) -> PodView:
    """A pod, and why it does not run."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    deleted = meta.get("deletionTimestamp")
    ready = conditions.get("Ready", {}).get("status") == "True" and deleted is None
    return PodView(
        name=meta["name"],
        group=(meta.get("labels") or {}).get(GROUP_LABEL, ""),
        ready=ready,
        trouble=None if ready else _trouble(status, conditions),
        ended=not ready and spec.get("restartPolicy") == "Never" and _has_ended(status),
        over=status.get("phase") in ("Succeeded", "Failed"),
        grace_ends=parse_time(deleted) if deleted else None,
    )


STARTING = frozenset({"ContainerCreating", "PodInitializing", "Completed", ""})
"""Reasons of a container that is on its way."""
CRASHED, PULL_BACK_OFF, PULL_ERROR = "CrashLoopBackOff", "ImagePullBackOff", "ErrImagePull"
"""Pauses between tries, and the error that the second of them quotes."""


def _trouble(status: Object, conditions: Mapping[str, Object]) -> str | None:
    """The first thing that keeps a pod from running: its scheduling, an eviction, one of its containers."""
    scheduled, failed = conditions.get("PodScheduled", {}), status.get("phase") == "Failed"
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', '')}"
    if failed and status.get("reason"):
        return f"{status['reason']}: {status.get('message', '')}".rstrip(": ")
    for kind, what in (("initContainerStatuses", "init container"), ("containerStatuses", "container")):
        for container in status.get(kind) or ():
            trouble = _container_trouble(container)
            if trouble:
                return f"{what} `{container['name']}`: {trouble}"
    return f"Failed: {status.get('message') or 'the pod failed'}" if failed else None


def _container_trouble(container: Object) -> str | None:
    """Why a container does not run, in the same words through all its tries: the status would change for ever else."""
    state, last = container.get("state") or {}, (container.get("lastState") or {}).get("terminated")
    waiting, ended = state.get("waiting"), state.get("terminated")
    pauses = waiting is not None and waiting.get("reason") == CRASHED and last is not None
    if waiting and waiting.get("reason", "") not in STARTING and not pauses:
        reason, message = waiting["reason"], waiting.get("message", "")
        if reason == PULL_BACK_OFF and PULL_ERROR in message:
            reason, message = PULL_ERROR, message.partition(f"{PULL_ERROR}: ")[2]
        return f"{reason}: {message}".rstrip(": ")
    if ended:
        return _end(ended) if _is_error(ended) else None
    if last and (pauses or _is_error(last)) and not container.get("ready"):
        return _end(last)
    return None


def _has_ended(status: Object) -> bool:
    """Whether an init container or Ray has failed, which shows before the phase does; not an eviction."""
    containers = [each for each in status.get("containerStatuses") or () if each["name"] == CONTAINER]
    containers += status.get("initContainerStatuses") or ()
    ends = [(container.get("state") or {}).get("terminated") for container in containers]
    return not status.get("reason") and any(ended and _is_error(ended) for ended in ends)


def _is_error(ended: Object) -> bool:
    return bool(ended.get("exitCode", 0))


def _end(ended: Object) -> str:
    reason, message = ended.get("reason", "Error"), " ".join((ended.get("message") or "").split())
    return f"{reason}, exit code {ended.get('exitCode')}" + (f": {message[-200:]}" if message else "")


def troubles(pods: Iterable[PodView]) -> str:
    """What keeps pods from running, each different reason once with the first pod that has it; empty if nothing."""
    first: dict[str, str] = {}
    for pod in sorted(pods, key=lambda pod: (pod.group != HEAD_GROUP, pod.name)):
        if pod.trouble:
            first.setdefault(pod.trouble, pod.name)
    return "; ".join(f"pod {name}: {trouble}" for trouble, name in list(first.items())[:TROUBLES])


def parse_time(text: str) -> datetime:
    """RFC 3339 as a time in UTC."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def format_time(time: datetime) -> str:
    """A time in UTC as RFC 3339, to the second, as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
