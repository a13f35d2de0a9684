"""The command line against a real API server, which has the CRD and nobody who runs jobs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from rlhf_operator import cli
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
CRD = ROOT / "crds" / "rlhfjobs.rlhf-operator.io.yaml"
QUICKSTART = ROOT / "examples" / "01-quickstart.yaml"


class Commands:
    """`rlhf` in one namespace, as one user."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane = plane
        self.namespace = namespace
        self.kubeconfig = plane.kubeconfig

    def __call__(self, *arguments: object) -> Any:
        place = ("-n", self.namespace, "--kubeconfig", self.kubeconfig)
        result = CliRunner().invoke(cli.app, [str(argument) for argument in (*arguments, *place)])
        assert "Traceback" not in result.output
        return result

    def says(self, *arguments: object) -> str:
        result = self(*arguments)
        assert result.exit_code == 0, result.output
        return str(result.stdout)

    def set_status(self, **status: Any) -> None:
        patch = json.dumps({"status": status})
        kubectl = ("patch", "rlhfjob", "quickstart", "-n", self.namespace, "--subresource=status", "--type=merge")
        self.plane.kubectl(*kubectl, "-p", patch)


@pytest.fixture
def rlhf(api_server: ControlPlane, namespace: str) -> Commands:
    api_server.kubectl("apply", "--server-side", "-f", CRD)
    api_server.kubectl("wait", "--for=condition=Established", "--timeout=60s", "crd/rlhfjobs.rlhf-operator.io")
    return Commands(api_server, namespace)


@pytest.fixture
def steps(tmp_path: Path) -> Any:
    """The quickstart with another number of steps, as a file."""

    def steps(count: int) -> Path:
        file = tmp_path / f"{count}.yaml"
        file.write_text(re.sub(r"steps: \d+", f"steps: {count}", QUICKSTART.read_text()))
        return file

    return steps


def condition(kind: str) -> dict[str, Any]:
    return {"type": kind, "status": "True", "reason": "Because", "message": "m", "observedGeneration": 1,
            "lastTransitionTime": "2020-01-01T00:00:00Z"}  # fmt: skip


def test_a_job_from_apply_to_delete(rlhf: Commands, steps: Any) -> None:
    assert rlhf.says("apply", QUICKSTART, "--dry-run", "server").endswith("created (server dry run)\n")
    assert rlhf.says("get", "-o", "name") == ""
    assert rlhf.says("apply", QUICKSTART).endswith("created\n")
    assert rlhf.says("apply", QUICKSTART).endswith("unchanged\n")
    assert rlhf.says("apply", steps(7)).endswith("configured\n")
    assert "does it run?" in rlhf.says("status", "quickstart")
    progress = {"step": 3, "steps": 7, "reward": 0.25}
    rlhf.set_status(phase="Training", gpus=0, progress=progress, conditions=[condition("Training")])
    assert re.search(r"quickstart +Training +3/7 +0.250 +0 ", rlhf.says("get"))
    assert "step 3 of 7" in rlhf.says("status", "quickstart")
    assert rlhf.says("wait", "quickstart", "--for", "Training") == "Training\n"
    assert rlhf("wait", "quickstart", "--timeout", "0s").exit_code == 124
    assert rlhf.says("suspend", "quickstart").endswith("suspended\n")
    assert json.loads(rlhf.says("get", "quickstart", "-o", "json"))["spec"]["suspend"] is True
    assert rlhf.says("resume", "quickstart").endswith("resumed\n")
    assert "no driver was submitted" in rlhf("logs", "quickstart").stderr
    assert rlhf("events", "quickstart").exit_code == 0
    rlhf.set_status(conditions=[condition("Failed")], phase="Failed")
    assert rlhf("wait", "quickstart").exit_code == 1
    assert rlhf.says("delete", "quickstart", "--wait").endswith("deleted\n")
    assert rlhf("get", "quickstart").exit_code == 2


def test_a_namespace_that_is_not_there(rlhf: Commands) -> None:
    rlhf.namespace = "nowhere"
    refused = rlhf("apply", QUICKSTART)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert 'namespace: got namespaces "nowhere" not found' in refused.stderr


def test_what_another_set_is_taken_over_only_if_asked(rlhf: Commands, steps: Any) -> None:
    rlhf.plane.kubectl("apply", "--server-side", "-n", rlhf.namespace, "-f", steps(7))
    refused = rlhf("apply", steps(8))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert ".spec.training.steps" in refused.stderr
    assert "--force-conflicts" in refused.stderr
    assert rlhf.says("apply", steps(8), "--force-conflicts").endswith("configured\n")


def test_what_the_api_server_does_not_take_is_one_line(rlhf: Commands, tmp_path: Path) -> None:
    rlhf.says("apply", QUICKSTART)
    rlhf.set_status(phase="Training", startTime="2026-01-01T00:00:00Z")
    file = tmp_path / "other.yaml"
    file.write_text(QUICKSTART.read_text() + "  image: other\n")
    refused = rlhf("apply", file)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "got a change of `image`" in refused.stderr


def test_one_who_may_not_is_told(rlhf: Commands) -> None:
    rlhf.plane.kubectl("create", "serviceaccount", "eve", "-n", rlhf.namespace)
    rlhf.kubeconfig = rlhf.plane.kubeconfig_of_service_account(rlhf.namespace, "eve")
    for command in (("get",), ("status", "job"), ("apply", QUICKSTART), ("delete", "job")):
        refused = rlhf(*command)
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert "cannot" in refused.stderr


def test_the_program_takes_the_cluster_from_the_environment(rlhf: Commands) -> None:
    environment = os.environ | {"KUBECONFIG": str(rlhf.kubeconfig)}
    command = [sys.executable, "-m", "rlhf_operator", "get", "-A"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
