"""What is left of a cluster that is gone, and of the time in which the operator was."""

from datetime import timedelta

import pytest
from operator_world import World
from rlhf_operator.kube import PODS, RAYCLUSTERS, ForbiddenError, UnavailableError
from rlhf_operator.observe import format_time

HEAD = "math-1-head"
CLAIM = {"name": "all", "persistentVolumeClaim": "all", "mountPath": "/checkpoints"}


@pytest.fixture
def world() -> World:
    made = World()
    made.submit()
    made.train()
    return made


def put_pod(world: World, name: str = HEAD, group: str = "headgroup", phase: str = "Running", **meta) -> None:
    """A pod of the first cluster."""
    labels = {"rlhf-operator.io/job": "math", "ray.io/cluster": "math-1", "ray.io/group": group}
    world.kube.put(PODS, {"metadata": {"name": name, "labels": labels, **meta}, "status": {"phase": phase}})


def lose_head(world: World) -> None:
    """KubeRay's word for it; the pause before the next try passes too."""
    world.set_cluster("math-1", head=False, reason="HeadPodNotFound")
    world.settle()
    world.later(11)


def grace_end(world: World, seconds: float) -> dict[str, str]:
    return {"deletionTimestamp": format_time(world.now + timedelta(seconds=seconds))}


@pytest.mark.parametrize("ending", ["lost", "suspended"])
def test_the_next_cluster_waits_until_the_pods_of_the_last_one_have_ended(world, ending):
    put_pod(world)
    put_pod(world, "math-1-a-worker", "train")
    if ending == "lost":
        lose_head(world)
    else:
        world.edit(suspend=True)
        world.settle()
        world.edit(suspend=False)
        world.settle()
    told = f"Waiting until pod {HEAD} and others of the last cluster has ended."
    assert (world.clusters(), world.status()["message"]) == ([], told)
    assert world.condition("ClusterReady") == ("False", "WaitingForPredecessor", told)
    assert world.pass_over() == 2, "nobody tells of a pod's end"
    put_pod(world, phase="Failed")
    world.settle()
    assert (world.clusters(), "math-1-a-worker" in world.status()["message"]) == ([], True)
    world.kube.remove(PODS, "math-1-a-worker")
    world.settle()
    assert world.clusters() == ["math-2"]


def test_a_pod_on_a_lost_node_holds_the_next_cluster_up_until_its_grace_is_over_and_no_longer(world):
    put_pod(world, **grace_end(world, 41))
    lose_head(world)
    world.later(39)
    assert world.clusters() == [], "it may be killed at this moment"
    world.later(2)
    assert world.clusters() == ["math-2"]


def test_what_may_not_be_listed_may_run(world):
    world.kube.denied["list", PODS] = ForbiddenError(403, "Forbidden", "RBAC says no")
    lose_head(world)
    assert (world.clusters(), "RBAC says no" in world.status()["message"]) == ([], True)
    world.kube.denied.clear()
    world.settle()
    assert world.clusters() == ["math-2"]


def test_a_job_made_anew_waits_for_the_pods_of_the_deleted_one_that_may_write_its_checkpoints():
    world = World()
    put_pod(world)
    world.submit(checkpoint={"path": "/checkpoints/math"}, storage=[CLAIM])
    world.settle()
    told = f"Waiting until pod {HEAD} of the last cluster has ended."
    assert (world.clusters(), world.status()["message"]) == ([], told)
    world.kube.remove(PODS, HEAD)
    world.settle()
    assert world.clusters() == ["math-1"]


def test_pods_are_listed_for_no_first_cluster_without_checkpoints_and_for_no_job_at_rest():
    world = World()
    world.submit()
    world.train()
    put_pod(world)
    world.edit(suspend=True)
    world.settle()
    world.later(600)
    assert ("list", "pods", "") not in world.kube.calls


def test_a_spec_that_is_refused_keeps_no_cluster_that_nobody_wants(world):
    world.kube.denied["delete", RAYCLUSTERS] = UnavailableError(503, "ServiceUnavailable", "come back later")
    world.set_cluster("math-1", head=False, reason="HeadPodNotFound")
    with pytest.raises(UnavailableError):
        world.pass_over()
    world.edit(training={"steps": "some"})
    world.kube.denied.clear()
    world.settle()
    assert (world.status()["phase"], world.clusters()) == ("Pending", [])


def test_a_silence_counts_only_as_far_as_somebody_listened(world):
    world.rays.away = True
    world.settle()
    world.now += timedelta(seconds=400)
    world.start_operator()
    world.settle()
    world.later(299)
    assert (world.clusters(), world.status()["failures"]) == (["math-1"], [])
    world.later(1)
    assert world.status()["failures"][0]["reason"] == "JobApiUnreachable"
