"""What the tests of the commands for a cluster share: how a command is run, and jobs as the API server gives them."""

from typing import Any

from api_server_double import JOBS, ApiServerDouble
from rlhf_operator import cli
from typer.testing import CliRunner


def condition(kind: str, value: str = "True", message: str = "") -> dict[str, Any]:
    return {"type": kind, "status": value, "reason": "Because", "message": message,
            "lastTransitionTime": "2020-01-01T00:00:00Z", "observedGeneration": 1}  # fmt: skip


def cluster_with(name: str) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", "uid": "c1", "resourceVersion": "1"}
    metadata |= {"creationTimestamp": "2020-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": {"head": {"serviceName": "job-1-head-svc"}}}


def job_with(name: str = "job", **fields: Any) -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": "default",
        "uid": "u1",
        "generation": 1,
        "creationTimestamp": "2020-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {"backoffLimit": 3}, "status": fields}


def rlhf(*arguments: object) -> Any:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


TRAINING = {
    "phase": "Training", "message": "step 12 of 200", "gpus": 16, "cluster": 1, "rayCluster": "job-1", "try": 2,
    "tries": 2, "submissionId": "job-1-2", "pools": [{"name": "train", "desired": 2, "ready": 2}],
    "poolSummary": "train 2/2", "programFailures": 1,
    "conditions": [condition("Accepted"), condition("Training", message="it\ntrains")],
    "failures": [{"kind": "Program", "cluster": 1, "try": 1, "reason": "NotFinite", "message": "a loss was NaN",
                  "time": "2020-01-01T00:00:00Z", "step": 7}],
    "progress": {"step": 12, "steps": 200, "reward": 0.2314, "kl": 0.0021, "tokensPerSecond": 812.4,
                 "weightVersion": 12, "lastCheckpoint": "/checkpoints/step-000010", "etaSeconds": 3700},
}  # fmt: skip
DONE = {"phase": "Succeeded", "conditions": [condition("Succeeded")]}


def becomes(**fields: Any) -> Any:
    return lambda server: server.objects.__setitem__(f"{JOBS}/job", job_with(**fields))


def until(holds: Any, step: Any) -> Any:
    """A step of the story that waits for something to hold."""

    def look(server: ApiServerDouble) -> None:
        if holds(server):
            step(server)
        else:
            server.story.insert(0, look)

    return look
