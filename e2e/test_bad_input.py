"""What a job is given wrongly: it is told within seconds in Kubernetes' own words, and is over at its deadline."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from live_cluster import Json, LiveCluster
from manifests import example
from reliability import record
from running_job import RunningJob, holds

pytestmark = pytest.mark.fault

DEADLINE_SECONDS = 60
SOON_SECONDS = 30
"""From a job's application until it has to be told; its pods are made, scheduled and started meanwhile."""
WATCH_SECONDS = 180
NEVER_MADE = "never-made"
"""A Secret, a claim and a storage class that do not exist."""
UNBOUND = "unbound"
"""A claim of that class."""
OTHER_RELEASE = "/other-release"


@dataclass(frozen=True)
class Mistake:
    """Something wrong in a manifest, and how it is told."""

    make: Callable[[Json, LiveCluster], Any]
    """Puts it into a spec."""
    words: tuple[str, ...]
    """Kubernetes' own, all in one message."""
    condition: tuple[str, str] = ("ClusterReady", "PodsNotStarting")
    """The condition that has them, and its reason."""
    infeasible: bool = False
    """Whether PlacementFeasible says so before there is a pod."""
    most_pods: int = 2
    """Pods that are made in all: a head and a worker, and more where they end and are made again."""
    most_writes: int = 6
    """Status writes from when it was told to the end: the same words are told once."""
    fault: str | None = None
    """Its name on the page of faults."""


@dataclass(frozen=True)
class Told:
    """One version of a job's status."""

    seconds: float
    """Since all jobs were applied."""
    status: Json

    def message_of(self, kind: str, reason: str) -> str:
        """The message of a condition that has this reason now; empty if it has another."""
        conditions = self.status.get("conditions", [])
        return next((each["message"] for each in conditions if (each["type"], each["reason"]) == (kind, reason)), "")


def mount(claim: str) -> list[Json]:
    return [{"name": "models", "persistentVolumeClaim": claim, "mountPath": "/models"}]


def fail_first(pods: Json, cluster: LiveCluster) -> None:
    """Has pods begin with a container that fails, of an image that is soon there."""
    container = {
        "name": "fetch",
        "image": cluster.images.operator,
        "command": ["bash", "-c", "echo the weights are not there >&2; exit 3"],
    }
    pods["podTemplate"]["spec"]["initContainers"] = [container]


def name_image_that_is_not_there(spec: Json, cluster: LiveCluster) -> None:
    repository = cluster.images.runtime.partition("@")[0].rpartition(":")[0]
    spec["image"] = f"{repository}:{NEVER_MADE}"


def name_image_without_ray(spec: Json, cluster: LiveCluster) -> None:
    spec["image"] = cluster.images.operator


def name_secret_that_is_not_there(spec: Json, cluster: LiveCluster) -> None:
    spec["image"] = cluster.images.operator  # it is pulled first, and this one is small
    secret = {"name": NEVER_MADE, "key": "token"}
    spec["env"] = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": secret}}]


def ask_for_gpus(spec: Json, _cluster: LiveCluster) -> None:
    spec["nodePools"][0]["gpusPerNode"] = 64


AGAIN: Json = {"condition": ("Training", "BackingOff"), "most_pods": 8, "most_writes": 14}
"""Where a pod fails for good: it is made again, with a new cluster, after pauses that grow."""
MISTAKES = {
    "no-image": Mistake(name_image_that_is_not_there, ("ErrImagePull", NEVER_MADE), fault="image that does not exist"),
    "no-ray": Mistake(name_image_without_ray, ("exit code 127", "ray: command not found"), **AGAIN),
    "no-claim": Mistake(
        lambda spec, _: spec.update(storage=mount(NEVER_MADE)),
        ("Unschedulable", f'persistentvolumeclaim "{NEVER_MADE}" not found'),
    ),
    "unbound-claim": Mistake(
        lambda spec, _: spec.update(storage=mount(UNBOUND)),
        ("Unschedulable", "unbound immediate PersistentVolumeClaims"),
    ),
    "no-secret": Mistake(
        name_secret_that_is_not_there,
        ("CreateContainerConfigError", f'secret "{NEVER_MADE}" not found'),
    ),
    "no-gpus": Mistake(ask_for_gpus, ("Unschedulable", "Insufficient nvidia.com/gpu"), infeasible=True),
    "init-fails": Mistake(
        lambda spec, cluster: fail_first(spec["head"], cluster),
        ("init container `fetch`", "exit code 3", "the weights are not there"),
        **AGAIN,
        fault="init container that fails",
    ),
    "init-of-worker-fails": Mistake(
        lambda spec, cluster: fail_first(spec["nodePools"][0], cluster),
        ("init container `fetch`", "exit code 3", "the weights are not there"),
    ),
}
"""By the names of the jobs, whose pods never come to run together."""


def quickstart(cluster: LiveCluster, name: str, **spec: Any) -> Json:
    """The first example under another name; its pods' settings are nobody else's."""
    manifest = copy.deepcopy(example("01-quickstart.yaml", cluster, 2, **spec))
    manifest["metadata"]["name"] = name
    for pods in (manifest["spec"]["head"], *manifest["spec"]["nodePools"]):
        pods["podTemplate"] = copy.deepcopy(pods["podTemplate"])
    return manifest


def mistaken(cluster: LiveCluster, name: str) -> Json:
    manifest = quickstart(cluster, name, preRunningDeadlineSeconds=DEADLINE_SECONDS)
    MISTAKES[name].make(manifest["spec"], cluster)
    return manifest


@pytest.fixture(scope="module")
def namespace(cluster: LiveCluster) -> Iterator[str]:
    """One for all jobs of this module, which wait for their deadlines at once."""
    with cluster.new_namespace() as name:
        yield name


@pytest.fixture(scope="module")
def told(cluster: LiveCluster, namespace: str) -> dict[str, list[Told]]:
    """Every version of the jobs' statuses, until all have ended."""
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": UNBOUND}}
    claim["spec"] = spec | {"storageClassName": NEVER_MADE}
    cluster.create(claim, *(mistaken(cluster, name) for name in MISTAKES), namespace=namespace)
    begin = time.monotonic()
    found: dict[str, list[Told]] = {name: [] for name in MISTAKES}
    path = f"/apis/rlhf-operator.io/v1alpha1/namespaces/{namespace}/rlhfjobs"
    query = {"watch": "true", "timeoutSeconds": str(WATCH_SECONDS)}
    with cluster.api.stream("GET", path, params=query, timeout=httpx.Timeout(30, read=None)) as events:
        for line in events.iter_lines():
            job = json.loads(line)["object"]
            found[job["metadata"]["name"]].append(Told(time.monotonic() - begin, job.get("status", {})))
            if all(versions and holds(versions[-1].status, "Failed") for versions in found.values()):
                break
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_told_soon_and_ends_at_its_deadline(
    cluster: LiveCluster, namespace: str, told: dict[str, list[Told]], name: str
) -> None:
    mistake, versions = MISTAKES[name], told[name]
    history = "\n".join(f"{each.seconds:.0f} s: {each.status.get('message')}" for each in versions)
    messages = [each.message_of(*mistake.condition) for each in versions]
    first = next((i for i, text in enumerate(messages) if all(word in text for word in mistake.words)), None)
    assert first is not None, f"{mistake.condition} never had {mistake.words}:\n{history}"
    seconds = versions[first].seconds
    assert seconds < SOON_SECONDS, history
    assert len(versions) - first <= mistake.most_writes, f"the status is written again and again:\n{history}"
    if mistake.infeasible:
        feasible = versions[first].message_of("PlacementFeasible", "TooFewNodes")
        assert "needs 1 nodes of 64 nvidia.com/gpu" in feasible, history

    status = versions[-1].status
    failed = versions[-1].message_of("Failed", "PreRunningDeadlineExceeded")
    assert status["phase"] == "Failed", history
    assert all(word in failed for word in (f"preRunningDeadlineSeconds of {DEADLINE_SECONDS}", *mistake.words)), history
    lasted = versions[-1].seconds
    assert DEADLINE_SECONDS - 2 < lasted < DEADLINE_SECONDS + 15, history

    gone(cluster, namespace, name)
    assert 1 <= made(cluster, namespace, name) <= mistake.most_pods, history
    if mistake.fault:
        outcome = f"told, then Failed at its deadline of {DEADLINE_SECONDS} s: PreRunningDeadlineExceeded"
        record(mistake.fault, messages[first], outcome, seconds)


def test_a_model_that_is_not_on_its_volume_ends_a_job_by_its_path(cluster: LiveCluster, namespace: str) -> None:
    manifest = quickstart(cluster, "no-model", storage=mount("models"))
    manifest["spec"]["models"]["policy"] = {"path": "/models/not-there"}
    cluster.claim(namespace, "models")
    cluster.create(manifest, namespace=namespace)
    status = RunningJob(cluster, namespace, "no-model").wait_for_end(300)
    failed = Told(0, status).message_of("Failed", "BadInput")
    assert (status["phase"], status["tries"]) == ("Failed", 1)
    assert "models.policy.path: got /models/not-there, which is no folder" in failed
    gone(cluster, namespace, "no-model")


def test_an_image_of_another_schema_version_refuses_and_names_both(cluster: LiveCluster, namespace: str) -> None:
    copy_with_other_version = f"""
        cp -r /opt/rlhf/lib/python3.*/site-packages/rlhf_api {OTHER_RELEASE}
        rm -r {OTHER_RELEASE}/rlhf_api/__pycache__
        sed -i 's/^SCHEMA_VERSION = 1$/SCHEMA_VERSION = 2/' {OTHER_RELEASE}/rlhf_api/runtime_config.py
        grep -q '^SCHEMA_VERSION = 2$' {OTHER_RELEASE}/rlhf_api/runtime_config.py
    """
    volume = {"name": "other-release", "mountPath": OTHER_RELEASE}
    manifest = quickstart(cluster, "other-release")
    head = manifest["spec"]["head"]
    head["env"] = [{"name": "PYTHONPATH", "value": OTHER_RELEASE}]
    head["podTemplate"]["spec"]["volumes"] = [{"name": "other-release", "emptyDir": {}}]
    head["podTemplate"]["spec"]["containers"][0]["volumeMounts"] = [volume]
    head["podTemplate"]["spec"]["initContainers"] = [
        {
            "name": "release",
            "image": cluster.images.runtime,
            "command": ["bash", "-ec", copy_with_other_version],
            "volumeMounts": [volume],
        }
    ]
    cluster.create(manifest, namespace=namespace)
    status = RunningJob(cluster, namespace, "other-release").wait_for_end(300)
    failed = Told(0, status).message_of("Failed", "BadInput")
    assert (status["phase"], status["tries"]) == ("Failed", 1)
    assert "schemaVersion: got 1; expected 2. Fix: use an operator and a runtime image of the same release" in failed
    gone(cluster, namespace, "other-release")


def gone(cluster: LiveCluster, namespace: str, name: str) -> None:
    """Waits until a job has neither pods nor RayClusters; that of pods is as long as the last one may take to end."""
    chosen = ("-n", namespace, "-l", f"rlhf-operator.io/job={name}")
    cluster.kubectl("wait", "--for=delete", "--timeout=60s", "rayclusters,pods", *chosen)


def made(cluster: LiveCluster, namespace: str, name: str) -> int:
    """How many pods KubeRay has made for a job, by its own events."""
    return sum(
        event.get("count") or 1
        for event in cluster.items("events", namespace)
        if event["reason"] in ("CreatedHeadPod", "CreatedWorkerPod")
        and event["involvedObject"]["name"].rpartition("-")[0] == name
    )
