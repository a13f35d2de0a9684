"""The operator as a process on a real API server, with the test in KubeRay's place."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, GpuNodes
from control_plane.processes import Process
from fake_head import FakeHead, fake_head
from operator_world import job_manifest
from rlhf_api.run_end import RunEnd
from silent_proxy import silent_proxy

ROOT = Path(__file__).parents[2]
KUBERAY = "github.com/ray-project/kuberay/ray-operator@*/config/crd/bases"
USER = "rlhf-operator"
RANDOM_MODEL = {"architecture": "qwen2", "config": {"hidden_size": 64}, "tokenizer": "ascii"}
"""A model that needs no volume."""
READY = {"HeadPodReady": "True", "RayClusterProvisioned": "True"}
JOB = "rlhf-operator.io/job"
RESYNC = 2.0
OPERATOR = {
    "RLHF_OPERATOR_METRICS_PORT": "0",
    "RLHF_OPERATOR_HEALTH_PORT": "0",
    "RLHF_OPERATOR_RESYNC_SECONDS": str(RESYNC),
}
Object = dict[str, Any]


class Team:
    """A namespace, and the operator that looks after it."""

    def __init__(self, cluster: ControlPlane, namespace: str, log: Path) -> None:
        self.cluster, self.namespace, self.log = cluster, namespace, log
        self.process: Process | None = None

    def start(self, kubeconfig: Path | None = None, **settings: str) -> Process:
        env = OPERATOR | {"KUBECONFIG": str(kubeconfig or self.cluster.kubeconfig_of(USER))}
        env |= {"RLHF_OPERATOR_NAMESPACES": self.namespace} | settings
        self.process = Process("operator", [sys.executable, "-m", "rlhf_operator.handlers"], self.log, env)
        self.process.start()
        return self.process

    def apply(self, name: str = "math", **spec: Any) -> None:
        manifest = json.dumps(job_manifest(name, **spec))
        self.cluster.kubectl("apply", "--server-side", "-n", self.namespace, "-f", "-", stdin=manifest)

    def until(self, what: str, holds: Callable[[], bool], seconds: float = 60) -> None:
        assert self.process
        self.process.wait_until(what, holds, seconds)

    def job(self, name: str = "math") -> Object:
        return self.cluster.get("rlhfjob", name, self.namespace)

    def reason(self, kind: str, name: str = "math") -> str:
        conditions = self.job(name).get("status", {}).get("conditions", ())
        return next((item["reason"] for item in conditions if item["type"] == kind), "")

    def clusters(self) -> list[str]:
        return [item["metadata"]["name"] for item in self.cluster.items("raycluster", self.namespace)]

    def set_cluster(self, name: str, ready: int, **conditions: str) -> None:
        """KubeRay's word about a cluster: the status of each condition, and its reason after a colon."""
        told = []
        for kind, word in conditions.items():
            status, _, reason = word.partition(":")
            times = {"lastTransitionTime": "2026-01-01T00:00:00Z", "message": ""}
            told.append({"type": kind, "status": status, "reason": reason or "Because", **times})
        patch = {"status": {"readyWorkerReplicas": ready, "conditions": told}}
        words = ("patch", "raycluster", name, "-n", self.namespace, "--subresource=status", "--type=merge")
        self.cluster.kubectl(*words, "-p", json.dumps(patch))


@pytest.fixture(scope="module")
def definitions(api_server: ControlPlane) -> None:
    """The kinds that the operator works with."""
    ray = next(Path(os.environ.get("GOMODCACHE", Path.home() / "go/pkg/mod")).glob(KUBERAY), None)
    if ray is None:
        pytest.skip("KubeRay's definitions are not there")
    api_server.apply(ROOT / "crds")
    api_server.apply(ray)


@contextmanager
def team_in(cluster: ControlPlane, namespace: str, folder: Path) -> Iterator[Team]:
    made = Team(cluster, namespace, folder / "operator.log")
    try:
        yield made
    finally:
        if made.process:
            made.process.stop(patience=10)


@pytest.fixture
def team(api_server: ControlPlane, definitions: None, namespace: str, tmp_path: Path) -> Iterator[Team]:
    """A team in whose cluster KubeRay does nothing: the test says what it would."""
    away = api_server.paused("kuberay") if "kuberay" in api_server.processes else nullcontext()
    with away, team_in(api_server, namespace, tmp_path) as made:
        yield made


@pytest.fixture
def whole(cluster: ControlPlane, definitions: None, namespace: str, tmp_path: Path) -> Iterator[Team]:
    """A team in a cluster with KubeRay, and with nodes for the job."""
    with cluster.nodes(GpuNodes(f"{namespace}-gpu", 4)), team_in(cluster, namespace, tmp_path) as made:
        yield made


@contextmanager
def quiet(team: Team, seconds: float) -> Iterator[list[str]]:
    """What the operator writes while nothing happens, which the list holds afterwards."""
    start, writes = team.cluster.audit_size, list[str]()
    yield writes
    time.sleep(seconds)
    requests = team.cluster.requests(USER, start)
    assert any(request.verb == "list" for request in requests), "the operator did not even look"
    writes += [f"{item.verb} {item.resource} {item.name}" for item in requests if item.writes]


def test_a_job_becomes_objects_that_belong_to_it_and_at_rest_nothing_is_written(team: Team) -> None:
    team.start()
    team.apply()
    team.until("cluster", lambda: team.reason("ClusterReady") == "WaitingForPods")
    job, uid = team.job(), team.job()["metadata"]["uid"]
    assert (job["status"]["phase"], job["status"]["rayCluster"]) == ("Provisioning", "math-1")
    assert "finalizers" not in job["metadata"]
    assert not [key for key in job["metadata"].get("annotations", {}) if "kopf" in key or "rlhf" in key]
    for kind in ("raycluster", "configmap", "networkpolicy"):
        made = team.cluster.get(kind, "math-1", team.namespace)["metadata"]
        assert "finalizers" not in made
        assert [owner["uid"] for owner in made["ownerReferences"]] == [uid]
    with quiet(team, 3 * RESYNC) as writes:
        pass
    assert writes == []
    assert "inconsistenc" not in team.log.read_text()


def test_a_ready_cluster_and_its_loss_are_told_and_the_next_one_made(team: Team) -> None:
    team.start(RLHF_OPERATOR_RETRY_DELAY_SECONDS="1")
    team.apply()
    team.until("cluster", lambda: team.clusters() == ["math-1"])
    team.set_cluster("math-1", 3, **READY)
    team.cluster.kubectl("wait", "--for=condition=ClusterReady", "--timeout=30s", "-n", team.namespace, "rlhfjob/math")
    assert team.job()["status"]["poolSummary"] == "train 2/2, rollout 1/1"
    team.set_cluster("math-1", 3, **READY | {"HeadPodReady": "False:HeadPodNotFound"})
    team.until("second cluster", lambda: team.clusters() == ["math-2"])
    assert team.job()["status"]["failures"][0]["reason"] == "HeadLost"
    events = {item["reason"] for item in team.cluster.items("event", team.namespace)}
    assert {"Creating", "AllPodsReady", "HeadLost"} <= events


def put_head_behind(team: Team, cluster: str, head: FakeHead) -> None:
    """The token, the service and the pod of a cluster's head, as KubeRay makes them, with a fake head in the pod."""
    ports = [{"name": "dashboard", "port": 8265}, {"name": "progress", "port": 8090}]
    target = int(head.url.rsplit(":", 1)[1])
    pod, service = f"{cluster}-head", f"{cluster}-head-svc"
    address = {"ip": team.cluster.pod_address, "targetRef": {"kind": "Pod", "name": pod, "namespace": team.namespace}}
    behind = [{"addresses": [address], "ports": [{"name": port["name"], "port": target} for port in ports]}]
    container = {"schedulerName": "nobody", "containers": [{"name": "ray", "image": "ray"}]}
    objects = (
        ("ServiceAccount", "default", {}),
        ("Secret", cluster, {"stringData": {"auth_token": "secret"}}),
        ("Service", service, {"spec": {"clusterIP": "None", "ports": ports}}),
        ("Pod", pod, {"spec": container}),
        ("Endpoints", service, {"subsets": behind}),
    )
    for kind, name, rest in objects:
        manifest = json.dumps({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **rest})
        team.cluster.kubectl("apply", "-n", team.namespace, "-f", "-", stdin=manifest)
    told = {"status": {"podIP": address["ip"], "podIPs": [{"ip": address["ip"]}], "phase": "Running"}}
    words = ("patch", "pod", pod, "-n", team.namespace, "--subresource=status", "-p", json.dumps(told))
    team.cluster.kubectl(*words)


def test_a_driver_is_submitted_once_followed_through_a_blip_and_its_end_is_told(team: Team) -> None:
    """Through the API server's service proxy, as from outside of a cluster."""
    with fake_head(team.cluster.pod_address) as head:
        team.start(RLHF_OPERATOR_FOLLOW_SECONDS="1", RLHF_OPERATOR_RETRY_DELAY_SECONDS="1")
        team.apply()
        team.until("cluster", lambda: team.clusters() == ["math-1"])
        put_head_behind(team, "math-1", head)
        assert head.jobs == {}, "submitted before the cluster was ready"
        team.set_cluster("math-1", 3, **READY)
        team.until("submission", lambda: "math-1-1" in head.jobs)
        head.progress = {"step": 4, "steps": 10, "reward": 0.25}
        head.jobs["math-1-1"]["status"] = "RUNNING"
        team.until("progress", lambda: team.job()["status"].get("progress", {}).get("step") == 4)
        assert team.job()["status"]["phase"] == "Training"

        head.broken = True
        team.until("blip", lambda: "unreachableSince" in team.job()["status"])
        assert team.reason("Training") == "DriverRunning"
        head.broken = False
        team.until("its end", lambda: "unreachableSince" not in team.job()["status"])

        head.logs["math-1-1"] = "step 4\n" + RunEnd.of(5, "worker actor-1 was lost").line({})
        head.jobs["math-1-1"] |= {"status": "FAILED", "driver_exit_code": 5}
        team.until("second try", lambda: "math-1-2" in head.jobs)
        assert head.jobs["math-1-2"]["entrypoint"].endswith("--resume")
        (failure,) = team.job()["status"]["failures"]
        assert (failure["kind"], failure["reason"], failure["step"]) == ("Infrastructure", "InfrastructureLost", 4)
        head.jobs["math-1-2"]["status"] = "SUCCEEDED"
        wait = ("wait", "--for=condition=Succeeded", "--timeout=60s", "-n", team.namespace, "rlhfjob/math")
        team.cluster.kubectl(*wait)
        team.until("end of the cluster", lambda: team.clusters() == [])
        assert sorted(head.jobs) == ["math-1-1", "math-1-2"]


def test_bundles_that_no_node_holds_are_refused_before_any_child_exists(team: Team) -> None:
    team.start()
    groups = job_manifest()["spec"]["placement"]["groups"]
    groups[0] |= {"workers": 3}
    groups.append({"name": "critic", "pool": "train", "roles": ["critic"], "workers": 2})
    team.apply(placement={"groups": groups}, algorithm={"ppo": {}}, rollout={"samplesPerPrompt": 1})
    team.until("refusal", lambda: team.reason("Accepted") == "InvalidSpec")
    message = team.job()["status"]["conditions"][0]["message"]
    assert "spec.placement.groups[3]: got 2 bundles of 1 GPU with PACK; expected at most 1" in message
    assert team.clusters() == []
    assert team.cluster.items("configmap", team.namespace, JOB) == []


def test_edits_take_effect_and_are_told(team: Team) -> None:
    team.start()
    team.apply()
    team.until("cluster", lambda: team.clusters() == ["math-1"])
    team.apply(suspend=True)
    team.until("suspension", lambda: team.clusters() == [] and team.reason("Suspended") == "SuspendedBySpec")
    assert team.job()["status"]["observedGeneration"] == team.job()["metadata"]["generation"] == 2
    team.apply(suspend=False, preRunningDeadlineSeconds=1)
    team.until("deadline", lambda: team.reason("Failed") == "PreRunningDeadlineExceeded")
    team.until("end of the cluster", lambda: team.clusters() == [])


def test_killed_at_any_moment_it_makes_one_cluster_a_job_and_no_second(team: Team) -> None:
    names = [f"job-{index}" for index in range(5)]
    for name in names:
        process = team.start()
        team.apply(name)
        start = team.cluster.audit_size
        team.until("write", lambda start=start: any(item.writes for item in team.cluster.requests(USER, start)))
        process.stop()
    team.start()
    team.until("all", lambda: all(team.reason("ClusterReady", name) == "WaitingForPods" for name in names))
    assert sorted(team.clusters()) == [f"{name}-1" for name in names]
    assert {team.job(name)["status"]["cluster"] for name in names} == {1}


def test_a_change_is_seen_though_every_open_connection_has_gone_silent(team: Team) -> None:
    port = int(team.cluster.server.rsplit(":", 1)[1])
    with silent_proxy(port) as proxy:
        kubeconfig = team.cluster.kubeconfig_of(USER)
        through = team.log.with_name("through-proxy")
        through.write_text(re.sub(rf":{port}\b", f":{proxy.port}", kubeconfig.read_text()))
        team.start(through)
        team.apply("before")
        team.until("cluster", lambda: team.clusters() == ["before-1"])
        proxy.silence()
        team.apply("after")
        team.until("cluster of the change", lambda: "after-1" in team.clusters(), seconds=90 - 60 + RESYNC)


def test_it_stops_when_it_is_told_to_and_leaves_nothing_that_holds_a_namespace_back(team: Team) -> None:
    process = team.start()
    team.apply()
    team.until("cluster", lambda: team.clusters() == ["math-1"])
    os.kill(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 15
    while not process.ended and time.monotonic() < deadline:
        time.sleep(0.1)
    assert process.ended
    team.cluster.kubectl("delete", "rlhfjob", "math", "-n", team.namespace, "--timeout=10s")


def test_kuberay_makes_the_cluster_ready_and_a_lost_head_is_replaced_with_its_cluster(whole: Team) -> None:
    whole.start(RLHF_OPERATOR_RETRY_DELAY_SECONDS="1", RLHF_OPERATOR_VIA_PROXY="false")
    whole.apply(storage=[], models={"policy": {"random": RANDOM_MODEL}})
    wait = ("wait", "--for=condition=ClusterReady", "--timeout=120s", "-n", whole.namespace, "rlhfjob/math")
    whole.cluster.kubectl(*wait)
    head = "ray.io/cluster=math-1,ray.io/node-type=head"
    whole.cluster.kubectl("delete", "pod", "-n", whole.namespace, "-l", head)
    whole.until("second cluster", lambda: whole.clusters() == ["math-2"])
    assert whole.job()["status"]["failures"][0]["reason"] == "HeadLost"
    whole.cluster.kubectl(*wait)
    whole.cluster.kubectl("delete", "rlhfjob", "math", "-n", whole.namespace, "--timeout=30s")
    whole.until("nothing left", lambda: whole.cluster.items("pod,raycluster,configmap", whole.namespace, JOB) == [])


def test_a_namespace_goes_in_seconds_though_the_operator_is_gone(whole: Team) -> None:
    process = whole.start()
    whole.apply()
    whole.until("cluster", lambda: whole.clusters() == ["math-1"])
    process.stop(patience=10)
    whole.cluster.kubectl("delete", "namespace", whole.namespace, "--timeout=60s")
    whole.cluster.kubectl("create", "namespace", whole.namespace)
