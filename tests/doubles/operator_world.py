"""The world around the operator, in memory: an API server, KubeRay's doing, and Ray's heads."""

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from rlhf_operator.kube import (
    EVENTS,
    NODES,
    PODS,
    RAYCLUSTERS,
    RLHFJOBS,
    ConflictError,
    KubeError,
    Listing,
    NotFoundError,
    Resource,
    UnavailableError,
    resource_of,
)
from rlhf_operator.observe import DriverView, Key, cluster_view
from rlhf_operator.ray_jobs import Head, UnreachableError
from rlhf_operator.reconcile import Reconciler
from rlhf_operator.settings import Settings
from rlhf_operator.shared_answer import SharedAnswer
from rlhf_operator.store import Store, keep_job
from rlhf_operator.surroundings import Surroundings
from rlhf_operator.work_queue import RetrySoon

Object = dict[str, Any]
NAMESPACE = "team"
START = datetime(2026, 1, 1, tzinfo=UTC)
T = TypeVar("T")
WRITES = frozenset({"apply", "create", "patch", "delete"})


def expire(answer: SharedAnswer[Any]) -> None:
    """Let the time pass that an answer is good for."""
    if answer._answer:
        answer._answer = answer._answer[0], 0.0


class FakeKube:
    """An API server that keeps objects, versions and uids; owners take their children with them.

    Attributes:
        namespace: The operator's own.
        in_pod: That it runs in a pod there.
        calls: Every request: verb, plural, name.
        failures: Taken one a request by verb; what is not None is raised in its place.
        denied: What every request of a verb and kind is answered with.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self.namespace = "rlhf-system"
        self.in_pod = True
        self.calls: list[tuple[str, str, str]] = []
        self.failures: dict[str, list[KubeError | None]] = {}
        self.denied: dict[tuple[str, Resource], KubeError] = {}
        self._clock = clock
        self._objects: dict[tuple[str, str | None, str], Object] = {}
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    @property
    def writes(self) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] in WRITES]

    def all(self, resource: Resource) -> list[Object]:
        return [obj for (plural, _, _), obj in self._objects.items() if plural == resource.plural]

    def peek(self, resource: Resource, name: str, namespace: str | None = NAMESPACE) -> Object:
        return self._objects[resource.plural, namespace, name]

    def put(self, resource: Resource, obj: Object, namespace: str | None = NAMESPACE) -> Object:
        """Put an object there as another client does; a change of the spec moves its generation."""
        key = (resource.plural, namespace, obj["metadata"]["name"])
        before = self._objects.get(key)
        made = copy.deepcopy(obj)
        meta = made["metadata"]
        if namespace:
            meta["namespace"] = namespace
        old = before["metadata"] if before else {}
        meta["uid"] = old.get("uid") or f"uid-{next(self._uids)}"
        meta["creationTimestamp"] = old.get("creationTimestamp") or self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")
        changed = before is None or before.get("spec") != made.get("spec")
        meta["generation"] = old.get("generation", 0) + changed
        meta["resourceVersion"] = str(next(self._versions))
        self._objects[key] = made
        return copy.deepcopy(made)

    def get(self, resource: Resource, namespace: str | None, name: str) -> Object | None:
        self._record("get", resource, name)
        return copy.deepcopy(self._objects.get((resource.plural, namespace, name)))

    def list(
        self, resource: Resource, namespace: str | None = None, labels: str = "", read: Callable[[Object], T] = dict
    ) -> Listing[T]:
        self._record("list", resource, "")
        found = [obj for obj in self.all(resource) if _matches(obj, labels)]
        found = [obj for obj in found if namespace in (None, obj["metadata"].get("namespace"))]
        return Listing([read(copy.deepcopy(obj)) for obj in found], str(next(self._versions)))

    def apply(self, manifest: Mapping[str, Any], resource: Resource | None = None, **_query: str) -> Object:
        resource = resource or resource_of(manifest)
        self._record("apply", resource, manifest["metadata"]["name"])
        return self.put(resource, {**copy.deepcopy(dict(manifest))}, manifest["metadata"]["namespace"])

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Object:
        name = manifest["metadata"]["name"]
        self._record("create", resource, name)
        if (resource.plural, manifest["metadata"]["namespace"], name) in self._objects:
            raise ConflictError(409, "AlreadyExists", name)
        return self.put(resource, dict(manifest), manifest["metadata"]["namespace"])

    def patch(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], subresource: str = ""
    ) -> Object:
        self._record("patch", resource, name)
        obj = self._objects.get((resource.plural, namespace, name))
        if obj is None:
            raise NotFoundError(404, "NotFound", name)
        version = patch.get("metadata", {}).get("resourceVersion")
        if version and version != obj["metadata"]["resourceVersion"]:
            raise ConflictError(409, "Conflict", name)
        part = subresource or "spec"
        return self.put(resource, {**obj, part: _merged(obj.get(part), patch[part])})

    def delete(self, resource: Resource, namespace: str, name: str, uid: str | None = None) -> bool:
        self._record("delete", resource, name)
        obj = self._objects.get((resource.plural, namespace, name))
        if obj is None or (uid and obj["metadata"]["uid"] != uid):
            return False
        self.remove(resource, name, namespace)
        return True

    def remove(self, resource: Resource, name: str, namespace: str | None = NAMESPACE) -> None:
        """Have an object gone, with all that it owns."""
        gone = self._objects.pop((resource.plural, namespace, name))
        uid = gone["metadata"]["uid"]
        for key, obj in list(self._objects.items()):
            if any(ref["uid"] == uid for ref in obj["metadata"].get("ownerReferences", ())):
                self._objects.pop(key, None)

    def _record(self, verb: str, resource: Resource, name: str) -> None:
        self.calls.append((verb, resource.plural, name))
        queued = self.failures.get(verb)
        failure = queued.pop(0) if queued else None
        if failure or (verb, resource) in self.denied:
            raise failure or self.denied[verb, resource]


def _merged(before: Any, patch: Any) -> Any:
    """A JSON merge patch, by RFC 7396: mappings merge at every depth, null removes, all else replaces."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(before) if isinstance(before, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _matches(obj: Object, labels: str) -> bool:
    have = obj["metadata"].get("labels", {})
    wanted = [part.partition("=") for part in labels.split(",") if part]
    return all(key in have and (not sign or have[key] == value) for key, sign, value in wanted)


class FakeRays:
    """The heads: by the name of their service, the submissions that each of them knows.

    Attributes:
        submitted: Every submission that was new to its head, with its command.
        away: Whether no head answers.
    """

    def __init__(self) -> None:
        self.heads: dict[str, dict[str, DriverView]] = {}
        self.submitted: list[tuple[str, str]] = []
        self.away = False
        self.on_submit: Callable[[str], None] = lambda submission_id: None
        """Called with each submission that is new to its head."""

    async def look(self, head: Head, submission_id: str) -> DriverView:
        if self.away:
            return DriverView("unreachable", "no connection could be made")
        return self.heads.get(head.service, {}).get(submission_id, DriverView("unknown"))

    async def submit(self, head: Head, submission_id: str, entrypoint: str, _metadata: Mapping[str, str]) -> None:
        if self.away:
            raise UnreachableError("no connection could be made")
        jobs = self.heads.setdefault(head.service, {})
        if submission_id not in jobs:
            self.on_submit(submission_id)
            self.submitted.append((submission_id, entrypoint))
            jobs[submission_id] = DriverView("pending")

    def set(self, submission_id: str, view: DriverView) -> None:
        for jobs in self.heads.values():
            if submission_id in jobs:
                jobs[submission_id] = view


def job_manifest(name: str = "math", **spec: Any) -> Object:
    """A small job that has two pools."""
    return {
        "apiVersion": "rlhf-operator.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": {
            "image": "example.com/runtime:test",
            "models": {"policy": {"path": "/models/policy"}},
            "storage": [{"name": "models", "persistentVolumeClaim": "models", "mountPath": "/models"}],
            "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
            "data": {"prompts": {"builtin": "arithmetic"}},
            "algorithm": {"grpo": {}},
            "rollout": {"samplesPerPrompt": 4},
            "training": {"steps": 10},
            "nodePools": [
                {"name": "train", "nodes": 2, "gpusPerNode": 2},
                {"name": "rollout", "nodes": 1, "gpusPerNode": 2},
            ],
            "placement": {
                "groups": [
                    {"name": "actor", "pool": "train", "roles": ["policy", "reference"], "workers": 4},
                    {"name": "rollout", "pool": "rollout", "roles": ["rollout"], "workers": 2},
                    {"name": "reward", "pool": "train", "roles": ["reward"], "workers": 1, "gpusPerWorker": 0},
                ]
            },
            **spec,
        },
    }


def gpu_node(name: str, gpus: int = 8) -> Object:
    return {
        "metadata": {"name": name, "labels": {}},
        "status": {"allocatable": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": str(gpus)}},
    }


class World:
    """An operator, its API server, and time that passes when it is told to."""

    def __init__(self, **settings: Any) -> None:
        self.now = START
        self.kube = FakeKube(lambda: self.now)
        self.rays = FakeRays()
        self.settings = Settings(**settings)
        for index in range(4):
            self.kube.put(NODES, gpu_node(f"node-{index}"), None)
        self.start_operator()

    def start_operator(self) -> None:
        """A new process: all that the old one remembered is gone."""
        self.store = Store()
        self.around = Surroundings(
            self.kube,  # type: ignore[arg-type]
            self.rays,  # type: ignore[arg-type]
            self.store,
            self.settings,
            lambda: self.now,
        )
        self.reconciler = Reconciler(self.around)

    def submit(self, name: str = "math", **spec: Any) -> Key:
        self.kube.put(RLHFJOBS, job_manifest(name, **spec))
        return NAMESPACE, name

    def edit(self, name: str = "math", **spec: Any) -> None:
        obj = copy.deepcopy(self.kube.peek(RLHFJOBS, name))
        obj["spec"] |= spec
        self.kube.put(RLHFJOBS, obj)

    def pass_over(self, key: Key = (NAMESPACE, "math")) -> float | None:
        """One pass, after everything was heard of."""
        self.store.replace_clusters(self.kube.list(RAYCLUSTERS, read=cluster_view))
        self.store.replace_jobs(self.kube.list(RLHFJOBS, read=keep_job))
        return self.pass_from_memory(key)

    def pass_from_memory(self, key: Key = (NAMESPACE, "math")) -> float | None:
        """One pass on what is remembered by now."""
        return asyncio.run(self._pass_over(key))

    async def _pass_over(self, key: Key) -> float | None:
        expire(self.around._nodes)
        expire(self.around._crd)
        return await self.reconciler.reconcile(key)

    def settle(self, key: Key = (NAMESPACE, "math"), passes: int = 20) -> None:
        """Passes until nothing is written any more, as a queue does: errors and changes in between are come back to."""
        for _ in range(passes):
            before = len(self.kube.writes), len(self.rays.submitted)
            retried = False
            try:
                self.pass_over(key)
            except (RetrySoon, KubeError, UnreachableError):
                retried = True
            if not retried and before == (len(self.kube.writes), len(self.rays.submitted)):
                return
        raise AssertionError(f"it does not settle: {self.kube.writes[-6:]}")

    def later(self, seconds: float, key: Key = (NAMESPACE, "math")) -> None:
        self.now += timedelta(seconds=seconds)
        self.settle(key)

    def status(self, name: str = "math") -> Object:
        return dict(self.kube.peek(RLHFJOBS, name).get("status", {}))

    def condition(self, kind: str, name: str = "math") -> tuple[str, str, str]:
        found = next(item for item in self.status(name)["conditions"] if item["type"] == kind)
        return found["status"], found["reason"], found["message"]

    def clusters(self) -> list[str]:
        return sorted(obj["metadata"]["name"] for obj in self.kube.all(RAYCLUSTERS))

    def events(self) -> list[str]:
        return [event["reason"] for event in self.kube.all(EVENTS)]

    def set_cluster(self, name: str, ready: int = 3, head: bool = True, reason: str = "", **status: Any) -> None:
        """KubeRay's word about a RayCluster."""
        obj = copy.deepcopy(self.kube.peek(RAYCLUSTERS, name))
        wanted = sum(group["minReplicas"] for group in obj["spec"]["workerGroupSpecs"])
        before = {item["type"]: item["status"] == "True" for item in obj.get("status", {}).get("conditions", ())}
        provisioned = before.get("RayClusterProvisioned", False) or (head and ready >= wanted)
        conditions = {"HeadPodReady": head, "RayClusterProvisioned": provisioned, **status.pop("conditions", {})}
        obj["status"] = {
            "readyWorkerReplicas": ready,
            "head": {"serviceName": f"{name}-head-svc"},
            "conditions": [
                {
                    "type": kind,
                    "status": "True" if holds else "False",
                    "reason": reason if kind == "HeadPodReady" and reason else "Because",
                    "message": "",
                    "lastTransitionTime": self.now.strftime("%Y-%m-%dT%H:%M:%SZ"),
                }
                for kind, holds in conditions.items()
            ],
            **status,
        }
        self.kube.put(RAYCLUSTERS, obj)

    def add_pods(self, cluster: str, **ready: int) -> None:
        """Pods that run, so many a group, in the place of those that were there."""
        for pod in self.kube.all(PODS):
            self.kube.remove(PODS, pod["metadata"]["name"])
        for group, count in ready.items():
            for index in range(count):
                status = {"conditions": [{"type": "Ready", "status": "True"}]}
                self.add_pod(cluster, f"{cluster}-{group}-{index}", group, status)

    def add_pod(self, cluster: str, name: str, group: str, status: Object) -> None:
        labels = {"ray.io/cluster": cluster, "ray.io/group": group}
        self.kube.put(PODS, {"metadata": {"name": name, "labels": labels}, "status": status})

    def train(self, name: str = "math", submission: str | None = None) -> None:
        """Bring a job to Training."""
        key = (NAMESPACE, name)
        self.settle(key)
        self.set_cluster(self.status(name)["rayCluster"])
        self.settle(key)
        self.rays.set(submission or self.status(name)["submissionId"], DriverView("running"))
        self.settle(key)


OUTAGES = (
    UnavailableError(500, "InternalError", "etcd is away"),
    UnavailableError(429, "TooManyRequests", "slow down"),
    ConflictError(409, "Conflict", "the object has been modified"),
)
"""What an API server answers on a bad day."""
