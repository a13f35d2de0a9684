"""What clusters do to a job: it goes on from its last checkpoint, and tells what happened."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from live_cluster import OPERATOR_NAMESPACE, LiveCluster
from manifests import example, kept
from reliability import record
from running_job import RunningJob, holds

STEPS, EVERY = 16, 4


@dataclass(frozen=True)
class Fault:
    """Something that is done to a job, and how it is told."""

    inject: Callable[[RunningJob], Any]
    reason: str | None
    """Of the failure; None where the job does not notice."""
    kind: str = "Infrastructure"
    """Whose limit it counts against."""
    clusters: int = 1
    """RayClusters that the job has had in the end."""


def kill_operator(job: RunningJob) -> None:
    operator = ("-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/component=operator")
    job.cluster.kubectl("delete", "pod", *operator, "--force", "--grace-period=0")


KILL_DRIVER = """
for process in /proc/[0-9]*; do
  case $(tr '\\0' ' ' <$process/cmdline) in "python -m rlhf_runtime"*) kill -9 ${process#/proc/} ;; esac
done
"""
FAULTS = {
    "head pod killed": Fault(lambda job: job.kill_pods("headgroup"), "HeadLost", clusters=2),
    "policy worker pod killed": Fault(lambda job: job.kill_pods("train"), "InfrastructureLost"),
    "rollout pod killed": Fault(lambda job: job.kill_pods("rollout"), "InfrastructureLost"),
    "driver killed": Fault(lambda job: job.run_in("headgroup", KILL_DRIVER), "Unexpected", "Program"),
    "operator killed during training": Fault(kill_operator, None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_job_goes_on(cluster: LiveCluster, namespace: str, name: str) -> None:
    fault = FAULTS[name]
    manifest = example("02-disaggregated.yaml", cluster, STEPS, **kept(every_steps=EVERY))
    job = RunningJob.start(cluster, namespace, manifest)
    job.wait("first checkpoint", lambda status: bool(checkpoint_of(status)))

    fault.inject(job)
    begin = time.monotonic()
    message, repeated = "nothing: the job goes on", 0
    if fault.reason:
        status = job.wait("failure", lambda status: bool(status["failures"]))
        message = f"{status['failures'][0]['reason']}: {status['failures'][0]['message']}"
        again = job.wait("next try", lambda status: status["tries"] == 2 and holds(status, "Training"))
        repeated = status["failures"][0]["step"] - checkpoint_of(again)
    recovered = time.monotonic() - begin

    status = job.wait_for_end()
    record(name, message, recovered, repeated)
    assert status["phase"] == "Succeeded"
    assert [row["step"] for row in job.metrics()] == list(range(1, STEPS + 1)), "a step is missing or there twice"
    told = [(failure["reason"], failure["kind"]) for failure in status["failures"]]
    assert told == ([(fault.reason, fault.kind)] if fault.reason else [])
    assert (status["cluster"], status["tries"]) == (fault.clusters, 1 + len(told))
    assert repeated <= EVERY


def checkpoint_of(status: dict[str, Any]) -> int:
    """The step of the newest checkpoint that a status tells of; 0 for none."""
    path = (status.get("progress") or {}).get("lastCheckpoint") or "step-0"
    return int(path.rsplit("-", 1)[1])
