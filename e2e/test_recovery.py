"""What clusters do to a job that trains: it goes on from its last checkpoint, and tells what happened."""

import time
from typing import Any

import pytest
from faults import FAULTS, SMOKE, Fault, kill_operator, need_own_operator
from live_cluster import LiveCluster
from manifests import example, kept
from reliability import record
from running_job import RunningJob, holds

EVERY = 4


@pytest.mark.fault
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.smoke) if name in SMOKE else name for name in FAULTS]
)
def test_a_job_goes_on(cluster: LiveCluster, namespace: str, name: str) -> None:
    fault = FAULTS[name]
    if fault.of_kind and not cluster.engine:
        pytest.skip(f"{name}: is done to kind's nodes, or to an operator of ours alone")
    if fault.inject is kill_operator:
        need_own_operator(cluster)
    manifest = example("02-disaggregated.yaml", cluster, fault.steps, **kept(every_steps=EVERY))
    if fault.rollout_memory:
        manifest["spec"]["nodePools"][1]["memory"] = fault.rollout_memory
    job = RunningJob.start(cluster, namespace, manifest, fault.megabytes)
    job.wait("first checkpoint", lambda status: bool(checkpoint_of(status)))
    try:
        suffer(job, name, fault)
    finally:
        fault.undo(job)


def suffer(job: RunningJob, name: str, fault: Fault) -> None:
    """Does it to the job, and looks at what comes of it."""
    begin = time.monotonic()
    fault.inject(job)
    message, seconds, repeated = "nothing: the job goes on", None, 0
    if fault.reason:
        status = job.wait("failure", lambda status: bool(status["failures"]))
        fault.mend(job)
        message = f"{status['failures'][0]['reason']}: {status['failures'][0]['message']}"
        again = job.wait("next try", lambda status: status["tries"] == 2 and holds(status, "Training"))
        repeated = status["failures"][0]["step"] - checkpoint_of(again)
        assert again["trainingTime"] >= job.ready_time(), "the driver was submitted before all pods were ready"
        seconds = time.monotonic() - begin

    status = job.wait_for_end()
    assert status["phase"] == "Succeeded"
    assert [row["step"] for row in job.metrics()] == list(range(1, fault.steps + 1)), "a step is missing or there twice"
    told = [(failure["reason"], failure["kind"]) for failure in status["failures"]]
    assert told == ([(fault.reason, fault.kind)] if fault.reason else [])
    assert (status["cluster"], status["tries"]) == (fault.clusters, 1 + len(told))
    assert repeated <= EVERY
    record(name, message, "trains again" if fault.reason else "trains on", seconds, repeated)


def checkpoint_of(status: dict[str, Any]) -> int:
    """The step of the newest checkpoint that a status tells of; 0 for none."""
    path = (status.get("progress") or {}).get("lastCheckpoint") or "step-0"
    return int(path.rsplit("-", 1)[1])
