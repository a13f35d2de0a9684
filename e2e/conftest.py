"""A cluster whose pods run, with the operator in it, and a namespace a test. `e2e/run.sh` says which cluster."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import evidence
import pytest
from control_plane import build
from live_cluster import OPERATOR_NAMESPACE, RELEASE, Images, LiveCluster
from manifests import example, kept
from running_job import RunningJob

OUT = Path(__file__).parents[1] / "build" / "e2e"


def _given(variable: str) -> str:
    if value := os.environ.get(variable):
        return value
    pytest.exit(
        f"{variable}: got nothing; expected it of whoever starts the tests. Fix: make e2e, or with a cluster of make "
        f'cluster-up and cluster-images: eval "$(e2e/kind/cluster.sh env)"',
        returncode=2,
    )


@pytest.fixture(scope="session")
def cluster() -> Iterator[LiveCluster]:
    """The cluster for the whole session, with the operator; one that somebody has installed there stays as it is."""
    OUT.mkdir(parents=True, exist_ok=True)
    images = Images(_given("RLHF_E2E_RUNTIME_IMAGE"), _given("RLHF_E2E_OPERATOR_IMAGE"))
    cluster = LiveCluster(Path(_given("KUBECONFIG")), OUT, build("kubectl", "helm"), images)
    if volumes := os.environ.get("RLHF_E2E_VOLUMES"):
        cluster.volumes = Path(volumes)
    cluster.storage_class = os.environ.get("RLHF_E2E_STORAGE_CLASS")
    cluster.engine = os.environ.get("RLHF_E2E_ENGINE")
    cluster.operator_is_ours = cluster.volumes is not None or not cluster.operator_installed
    if cluster.operator_is_ours:
        with evidence.collected(cluster, OPERATOR_NAMESPACE, OUT / "operator"):
            cluster.install_operator()
            if cluster.volumes:
                cluster.pull_images()
    yield cluster
    if cluster.operator_is_ours and cluster.volumes is None:
        cluster.helm("uninstall", RELEASE, "--wait")
        cluster.kubectl("delete", "namespace", OPERATOR_NAMESPACE, "--wait=false")


@pytest.fixture
def namespace(cluster: LiveCluster) -> Iterator[str]:
    """A namespace of the test's own, which is gone when the test is over."""
    with cluster.new_namespace() as name:
        yield name


@pytest.fixture(scope="module")
def job(cluster: LiveCluster) -> Iterator[RunningJob]:
    """One that trains for longer than the tests of a module take."""
    manifest = example("01-quickstart.yaml", cluster, 500, **kept(every_steps=100))
    with cluster.new_namespace() as namespace:
        with evidence.collected(cluster, namespace, OUT / "job"):
            job = RunningJob.start(cluster, namespace, manifest)
            job.wait_for_step(1)
        yield job


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Keeps what a cluster knows of a failed test, before its namespace goes."""
    report = yield
    given: dict[str, Any] = getattr(item, "funcargs", {})
    namespace = given.get("namespace") or getattr(given.get("job"), "namespace", None)
    if report.failed and call.when in ("setup", "call") and "cluster" in given and namespace:
        folder = OUT / item.name
        evidence.collect(given["cluster"], namespace, folder)
        report.sections.append(("evidence", f"What the cluster knows of it is in {folder}"))
    return report
