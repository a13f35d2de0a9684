"""The chart installed by helm, and an operator that has the rights which it grants, no others."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, GpuNodes, build
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rlhf-operator"
OUTSIDE = {"RLHF_OPERATOR_METRICS_PORT": "0", "RLHF_OPERATOR_HEALTH_PORT": "0", "RLHF_OPERATOR_VIA_PROXY": "false"}
"""What differs for an operator that is a process beside the cluster: ports are taken, and no head can be reached."""


@pytest.fixture(scope="module")
def helm() -> Path:
    return build("helm")["helm"]


@contextmanager
def installed(helm: Path, cluster: ControlPlane, namespace: str, *sets: str) -> Iterator[None]:
    """The chart as a release `op`, the definition being the session's."""
    cluster.apply(ROOT / "crds")
    base = [helm, "--kubeconfig", cluster.kubeconfig, "--namespace", namespace]
    values = [word for one in ("crds.install=false", "fullnameOverride=op", *sets) for word in ("--set", one)]
    subprocess.run([*base, "install", "op", CHART, *values], check=True, capture_output=True, timeout=60)
    try:
        yield
    finally:
        subprocess.run([*base, "uninstall", "op"], check=True, capture_output=True, timeout=60)


@contextmanager
def operator(cluster: ControlPlane, namespace: str, log: Path) -> Iterator[None]:
    """The operator with the settings of the Deployment and the rights of its account."""
    pod = cluster.get("deployment", "op", namespace)["spec"]["template"]["spec"]
    settings = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
    account = cluster.kubeconfig_of_service_account(namespace, pod["serviceAccountName"])
    environment = os.environ | settings | OUTSIDE | {"KUBECONFIG": str(account)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlhf_operator.handlers"], env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def applied(cluster: ControlPlane, namespace: str, manifest: dict[str, Any], folder: Path) -> None:
    manifest["spec"]["image"] = "example.com/runtime:test"
    file = folder / "job.yaml"
    YAML().dump(manifest, file)
    cluster.kubectl("apply", "--namespace", namespace, "--server-side", "-f", file)


def can(cluster: ControlPlane, account: str, *what: str) -> bool:
    return cluster.kubectl("auth", "can-i", *what, f"--as={account}", check=False).strip().endswith("yes")


@pytest.mark.parametrize("mode", ["cluster", "namespaced"])
def test_the_operator_is_never_refused(
    cluster: ControlPlane, namespace: str, helm: Path, mode: str, manifest: dict[str, Any], tmp_path: Path
) -> None:
    sets = [f"watchNamespaces={{{namespace}}}"] if mode == "namespaced" else []
    account, mark = f"system:serviceaccount:{namespace}:op", cluster.audit_size
    job = ["--namespace", namespace, "rlhfjob/job"]
    with (
        cluster.nodes(GpuNodes(f"{namespace}-cpu", 2, gpus=0)),
        installed(helm, cluster, namespace, *sets),
        operator(cluster, namespace, tmp_path / "log"),
    ):
        applied(cluster, namespace, manifest, tmp_path)
        cluster.kubectl("wait", "--for=condition=Accepted", "--timeout=60s", *job)
        cluster.kubectl("wait", "--for=condition=ClusterReady", "--timeout=120s", *job)
        cluster.kubectl("wait", "--for=jsonpath={.status.submissionId}=job-1-1", "--timeout=60s", *job)
        cluster.kubectl("delete", "--timeout=60s", *job)
        cluster.kubectl("wait", "--for=delete", "--timeout=60s", "-n", namespace, "raycluster/job-1")

        for forbidden in (("create", "pods"), ("list", "secrets"), ("create", "rolebindings"), ("update", "rlhfjobs")):
            assert not can(cluster, account, *forbidden, "--namespace", namespace)
        assert can(cluster, account, "get", "rlhfjobs", "--namespace=default") == (mode == "cluster")

    # `can` asked in the account's name.
    asked = [request for request in cluster.requests(account, mark) if request.resource != "selfsubjectaccessreviews"]
    assert {(request.verb, request.resource) for request in asked if request.code == 403} == set()
    told = {(request.verb, request.resource) for request in asked}
    assert {("patch", "rlhfjobs/status"), ("create", "rayclusters"), ("create", "events")} <= told
    if mode == "namespaced":
        assert {request.namespace for request in asked if request.resource} == {namespace}


def test_its_pods_are_admitted_where_the_restricted_standard_is_enforced(
    cluster: ControlPlane, namespace: str, helm: Path
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    with cluster.nodes(GpuNodes(f"{namespace}-cpu", gpus=0)), installed(helm, cluster, namespace):
        cluster.kubectl("wait", "--for=condition=Available", "--timeout=60s", "-n", namespace, "deployment/op")
        command = [helm, "template", "op", CHART, f"--namespace={namespace}", "--kube-version=1.34.0"]
        command += ["--show-only=templates/tests/health.yaml"]
        test = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "created" in cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=test)
