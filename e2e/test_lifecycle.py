"""Jobs that are deleted, suspended, or met by an operator that dies, comes twice, or is gone."""

import time
from collections.abc import Iterator

import pytest
from faults import kill_operator, need_own_operator
from live_cluster import OPERATOR, OPERATOR_NAMESPACE, RELEASE, LiveCluster
from manifests import example, kept
from reliability import record
from running_job import RunningJob, holds

pytestmark = pytest.mark.fault
STEPS, EVERY = 12, 4
GONE_SECONDS = 90
"""How long the pods of a job may take to go: they have 30 s to end by themselves."""


def start(cluster: LiveCluster, namespace: str, **spec: object) -> RunningJob:
    manifest = example("02-disaggregated.yaml", cluster, STEPS, **kept(every_steps=EVERY), **spec)
    return RunningJob.start(cluster, namespace, manifest)


def succeeds_with_one_try(job: RunningJob) -> None:
    status = job.wait_for_end()
    assert (status["phase"], status["cluster"], status["tries"]) == ("Succeeded", 1, 1)
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1)), "a step is missing or there twice"


def test_a_job_is_made_once_by_operators_that_die(cluster: LiveCluster, namespace: str) -> None:
    need_own_operator(cluster)
    job = start(cluster, namespace)
    kill_operator(job)
    job.wait("RayCluster's name", lambda status: bool(status.get("rayCluster")))
    kill_operator(job)
    job.wait("ready cluster", lambda status: holds(status, "ClusterReady"))
    kill_operator(job)
    begin = time.monotonic()
    job.wait("training", lambda status: holds(status, "Training"))
    seconds = time.monotonic() - begin
    assert len(cluster.items("rayclusters", namespace)) == 1
    succeeds_with_one_try(job)
    record("operator killed during apply", "nothing: the job is made, once", "trains", seconds)


@pytest.fixture
def two_operators(cluster: LiveCluster) -> Iterator[None]:
    """A second operator beside the first, as after a mistaken `kubectl scale`."""

    def scale(operators: int) -> None:
        deployment = ("-n", OPERATOR_NAMESPACE, f"deployment/{RELEASE}")
        cluster.kubectl("scale", *deployment, f"--replicas={operators}")
        cluster.kubectl("rollout", "status", *deployment, "--timeout=120s")

    need_own_operator(cluster)
    try:
        scale(2)
        yield
    finally:
        scale(1)


@pytest.mark.usefixtures("two_operators")
def test_two_operators_make_one_cluster_and_one_driver(cluster: LiveCluster, namespace: str) -> None:
    assert len(cluster.items("pods", OPERATOR_NAMESPACE, OPERATOR[-1])) == 2
    job, begin = start(cluster, namespace), time.monotonic()
    job.wait("training", lambda status: holds(status, "Training"))
    seconds = time.monotonic() - begin
    assert len(cluster.items("rayclusters", namespace)) == 1
    succeeds_with_one_try(job)
    record("two operators by mistake", "nothing: one cluster, one driver", "trains", seconds)


def test_a_job_that_is_deleted_leaves_nothing(cluster: LiveCluster, namespace: str) -> None:
    job = start(cluster, namespace)
    job.wait_for_step(2)
    begin = time.monotonic()
    job.delete()
    job.wait_until_gone(GONE_SECONDS)
    record("job deleted during a step", "nothing: it is gone", "nothing is left", time.monotonic() - begin)


@pytest.mark.parametrize("operator", ["there", "uninstalled first"])
def test_a_namespace_that_is_deleted_goes(cluster: LiveCluster, namespace: str, operator: str) -> None:
    if operator != "there" and not cluster.engine:
        pytest.skip("an operator that others have installed stays")
    job = start(cluster, namespace)
    job.wait_for_step(2)
    if operator != "there":
        cluster.helm("uninstall", RELEASE, "--wait")
    try:
        begin = time.monotonic()
        cluster.kubectl("delete", "namespace", namespace, f"--timeout={GONE_SECONDS}s")
        seconds = time.monotonic() - begin
    finally:
        if operator != "there":
            cluster.install_operator()
    if operator == "there":
        record("namespace deleted", "nothing: it is gone", "nothing is left", seconds)


def test_a_job_is_suspended_in_each_phase(cluster: LiveCluster, namespace: str) -> None:
    job = start(cluster, namespace, suspend=True)
    seconds = suspended(job)
    assert job.left() == set(), "a job that was suspended from the start has made something"
    for phase in ("Provisioning", "Training", "Restarting"):
        job.suspend(False)
        if phase == "Restarting":
            job.wait("training", lambda status: holds(status, "Training"))
            job.kill_pods("headgroup")
        job.wait(phase, lambda status, phase=phase: status["phase"] == phase)
        if phase == "Training":
            job.wait("checkpoint", lambda status: bool((status.get("progress") or {}).get("lastCheckpoint")))
        job.suspend(True)
        seconds = max(seconds, suspended(job))
    job.suspend(False)
    status = job.wait_for_end()
    assert status["phase"] == "Succeeded"
    assert [failure["reason"] for failure in status["failures"]] == ["HeadLost"], "suspension was counted as a failure"
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1)), "a step is missing or there twice"
    record("suspended in each phase", "Suspended: its pods are gone", "trains when resumed", seconds)


def suspended(job: RunningJob) -> float:
    """Seconds until a job is suspended and all of its pods are gone."""
    begin = time.monotonic()
    job.wait("suspension", lambda status: status.get("phase") == "Suspended", GONE_SECONDS)
    job.wait_until_gone(GONE_SECONDS)
    return time.monotonic() - begin
