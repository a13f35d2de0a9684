"""Where the operator may not look, cannot read, or finds another's: it does what it still can, and nothing else."""

import copy

import pytest
from operator_world import NAMESPACE, World, job_manifest
from rlhf_operator.kube import (
    CONFIGMAPS,
    CRDS,
    NETWORKPOLICIES,
    NODES,
    PODS,
    RAYCLUSTERS,
    RLHFJOBS,
    SECRETS,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from rlhf_operator.observe import DriverView
from rlhf_operator.reconcile import NameTakenError
from rlhf_operator.work_queue import RetrySoon

FORBIDDEN = ForbiddenError(403, "Forbidden", "RBAC says no")
AWAY = UnavailableError(503, "ServiceUnavailable", "come back later")


@pytest.fixture
def world() -> World:
    made = World()
    made.submit()
    return made


def put_status(world: World, **fields) -> None:
    """What another release, or a person, has written into the status."""
    obj = copy.deepcopy(world.kube.peek(RLHFJOBS, "math"))
    obj["status"] |= fields
    world.kube.put(RLHFJOBS, obj)


def end(world: World, **changes) -> None:
    world.rays.set(world.status()["submissionId"], DriverView(**{"state": "succeeded"} | changes))


def test_a_status_of_another_release_is_read_and_what_it_knows_more_stays(world):
    world.train()
    put_status(world, isNew={"x": 1})
    world.settle()
    end(world)
    world.settle()
    assert (world.status()["phase"], world.status()["isNew"]) == ("Succeeded", {"x": 1})


def test_a_job_whose_status_cannot_be_read_is_left_alone_and_told(world):
    world.train()
    put_status(world, phase="Lost")
    world.settle()
    assert (world.clusters(), world.status()["rayCluster"]) == (["math-1"], "math-1")
    assert "cannot read its status: status.phase: got 'Lost'" in world.status()["message"]
    before = len(world.kube.writes)
    world.later(600)
    assert world.kube.writes[before:] == []


@pytest.mark.parametrize("resource", [CONFIGMAPS, NETWORKPOLICIES])
def test_an_object_of_another_that_has_the_name_is_neither_written_nor_deleted(world, resource):
    world.kube.put(resource, {"metadata": {"name": "math-1"}, "data": {"theirs": "1"}})
    for _ in range(3):
        with pytest.raises(NameTakenError):
            world.pass_over()
    assert world.condition("ClusterReady")[1] == "CreateRefused"
    assert f"{resource.kind} math-1 is not this job's" in world.condition("ClusterReady")[2]
    world.edit(suspend=True)
    world.settle()
    assert world.kube.peek(resource, "math-1")["data"] == {"theirs": "1"}
    assert ("delete", resource.plural, "math-1") not in world.kube.calls


@pytest.mark.parametrize("ending", ["suspended", "failed", "replaced"])
@pytest.mark.parametrize("gone", [True, False])
def test_nothing_of_a_cluster_stays_behind_whoever_deletes_it(world, gone, ending):
    world.train()
    if gone:
        world.kube.remove(RAYCLUSTERS, "math-1")
    world.kube.failures["delete"] = [None, AWAY, AWAY]
    if ending == "suspended":
        world.edit(suspend=True)
    elif ending == "failed":
        world.edit(activeDeadlineSeconds=1)
    else:
        world.set_cluster("math-1", head=False, reason="HeadPodNotFound") if not gone else None
    for _ in range(4):
        world.later(20)
    left = [obj["metadata"]["name"] for kind in (CONFIGMAPS, NETWORKPOLICIES) for obj in world.kube.all(kind)]
    assert left == (["math-2", "math-2"] if ending == "replaced" else [])


def test_what_a_cluster_left_is_gone_before_the_next_is_named(world):
    world.train()
    world.kube.denied["get", CONFIGMAPS] = FORBIDDEN
    world.kube.remove(RAYCLUSTERS, "math-1")
    world.later(60)
    assert (world.clusters(), world.status()["cluster"]) == ([], 1)
    assert "RBAC says no" in world.status()["message"]
    world.kube.denied.clear()
    world.later(15)
    assert world.clusters() == ["math-2"]
    assert [obj["metadata"]["name"] for obj in world.kube.all(CONFIGMAPS)] == ["math-2"]


def test_a_failed_read_of_kuberays_definition_holds_a_job_up_for_no_longer_than_it_lasts(world):
    world.kube.denied["get", CRDS] = AWAY
    world.settle()
    assert (world.clusters(), world.status()["phase"]) == ([], "Pending")
    assert "come back later" in world.status()["message"]
    world.kube.denied.clear()
    world.around._crd.expire = lambda: None
    world.settle()
    assert world.clusters() == ["math-1"]


def test_a_spec_that_can_no_longer_be_read_is_told_and_its_job_is_followed_to_its_end(world):
    world.train()
    world.edit(training={"steps": "some"}, activeDeadlineSeconds=3600)
    world.start_operator()
    for _ in range(2):
        world.settle()
        assert world.condition("Accepted")[:2] == ("False", "InvalidSpec")
        assert "spec.training.steps" in world.condition("Accepted")[2]
    assert world.status()["phase"] == "Training"
    end(world)
    world.settle()
    assert (world.status()["phase"], world.clusters()) == ("Succeeded", [])


def test_a_spec_that_cannot_be_read_can_be_suspended_and_ended(world):
    world.train()
    world.edit(training={"steps": "some"}, suspend=True)
    world.settle()
    assert (world.clusters(), world.condition("Suspended")[0]) == ([], "True")
    other = World()
    other.submit()
    other.train()
    other.edit(training={"steps": "some"}, activeDeadlineSeconds=100)
    other.later(200)
    assert other.condition("Failed")[1] == "ActiveDeadlineExceeded"


def test_without_its_secret_a_job_is_told_can_be_suspended_and_has_its_deadline():
    world = World()
    world.submit(activeDeadlineSeconds=200)
    world.kube.denied["get", SECRETS] = FORBIDDEN
    world.settle()
    world.set_cluster("math-1")
    world.settle()
    assert "the Secret of its token cannot be read: Forbidden (403): RBAC says no" in world.status()["message"]
    world.edit(suspend=True)
    world.settle()
    assert (world.status()["phase"], world.clusters()) == ("Suspended", [])
    world.edit(suspend=False)
    world.settle()
    world.set_cluster("math-2")
    world.later(201)
    assert world.condition("Failed")[1] == "ActiveDeadlineExceeded"


def test_pods_that_may_not_be_looked_at_are_told_once(world):
    world.kube.denied["list", PODS] = FORBIDDEN
    world.settle()
    world.set_cluster("math-1", ready=1)
    world.later(5)
    assert world.condition("ClusterReady")[1] == "WaitingForPods"
    assert "its pods cannot be looked at: Forbidden" in world.condition("ClusterReady")[2]
    before = len(world.kube.writes)
    for _ in range(10):
        world.later(5)
    assert world.kube.writes[before:] == []


def elastic() -> World:
    world = World()
    pools = job_manifest()["spec"]["nodePools"]
    world.submit(nodePools=[pools[0], {**pools[1], "minNodes": 1, "maxNodes": 4}])
    world.settle()
    return world


def test_spare_nodes_of_a_pool_that_scales_make_up_for_none_of_another():
    world = elastic()
    world.set_cluster("math-1", ready=3)
    world.add_pods("math-1", headgroup=1, train=1, rollout=2)
    world.later(10)
    assert world.rays.submitted == []
    assert world.condition("ClusterReady")[:2] == ("False", "WaitingForPods")
    assert "by pools: train 1/2, rollout 2/1" in world.condition("ClusterReady")[2]
    world.add_pods("math-1", headgroup=1, train=2, rollout=2)
    world.set_cluster("math-1", ready=4)
    world.settle()
    assert world.rays.submitted[0][0] == "math-1-1"
    assert world.status()["poolSummary"] == "train 2/2, rollout 2/1"


def test_a_job_that_scales_and_trains_costs_no_list_of_its_pods_until_their_number_changes():
    world = elastic()
    world.add_pods("math-1", train=2, rollout=1)
    world.train()
    before = len(world.kube.calls)
    world.later(60)
    assert ("list", "pods", "") not in world.kube.calls[before:]
    world.add_pods("math-1", train=2, rollout=3)
    world.set_cluster("math-1", ready=5)
    world.later(60)
    assert world.status()["poolSummary"] == "train 2/2, rollout 3/1"


def test_a_success_that_is_seen_at_the_deadline_is_one():
    world = World()
    world.submit(activeDeadlineSeconds=100)
    world.train()
    end(world)
    world.later(101)
    assert world.status()["phase"] == "Succeeded"


def test_a_try_that_follows_a_silent_one_has_all_of_its_patience(world):
    world.train()
    world.rays.away = True
    world.later(200)
    world.rays.away = False
    end(world, state="failed", exit_code=1)
    world.later(30)
    world.rays.away = True
    world.later(200)
    assert world.clusters() == ["math-1"]


@pytest.mark.parametrize("state", ["finished", "suspended"])
def test_what_has_finished_or_is_suspended_asks_for_nothing(world, state):
    world.train()
    if state == "finished":
        end(world)
    else:
        world.edit(suspend=True)
    world.settle()
    world.later(60)
    before = len(world.kube.calls)
    world.later(600)
    asked = set(world.kube.calls[before:])
    assert asked == {("list", "rayclusters", ""), ("list", "rlhfjobs", "")}, "more than the test's own lists"


def test_nodes_that_cannot_be_listed_for_a_while_are_not_nodes_that_may_not_be(world):
    world.settle()
    world.kube.denied["list", NODES] = AWAY
    world.set_cluster("math-1", ready=0)
    world.later(60)
    assert world.condition("PlacementFeasible")[:2] == ("True", "NodesFit"), "the last list still counts"
    world.kube.denied["list", NODES] = FORBIDDEN
    world.later(60)
    assert world.condition("PlacementFeasible")[:2] == ("Unknown", "NodesUnknown")
    new = World()
    new.submit()
    new.kube.denied["list", NODES] = AWAY
    new.settle()
    assert "PlacementFeasible" not in {told["type"] for told in new.status()["conditions"]}
    assert new.clusters() == ["math-1"]


def test_an_edit_after_the_end_is_observed(world):
    world.train()
    end(world)
    world.settle()
    world.edit(ttlSecondsAfterFinished=5000)
    world.settle()
    assert world.status()["observedGeneration"] == 2


def test_a_namespace_that_is_gone_is_not_told_as_a_kind_that_is_not_installed(world):
    world.kube.failures["apply"] = [NotFoundError(404, "NotFound", 'namespaces "team" not found')] * 2
    for _ in range(2):
        with pytest.raises(NotFoundError):
            world.pass_over()
    assert 'namespaces "team" not found' in world.condition("ClusterReady")[2]
    assert "not installed" not in world.condition("ClusterReady")[2]


def test_a_try_that_has_its_name_waits_for_a_cluster_that_is_whole_again(world):
    world.settle()
    world.set_cluster("math-1")
    world.rays.away = True
    world.settle()
    assert world.status()["submissionId"] == "math-1-1"
    world.rays.away = False
    world.set_cluster("math-1", ready=2)
    world.later(5)
    assert world.rays.submitted == []
    assert "2 of 3 workers are ready" in world.status()["message"]
    world.set_cluster("math-1")
    world.later(5)
    assert [name for name, _ in world.rays.submitted] == ["math-1-1"]


def test_an_old_cluster_that_lost_a_worker_is_looked_at_soon(world):
    world.train()
    world.later(36_000)
    world.set_cluster("math-1", ready=2)
    end(world, state="failed", exit_code=5)
    world.settle()
    world.later(11)
    assert world.pass_over((NAMESPACE, "math")) < 10


def test_why_an_action_was_refused_is_told_though_another_wrote_in_between(world):
    world.kube.failures["apply"] = [ForbiddenError(403, "Forbidden", "exceeded quota")] * 2
    world.kube.failures["patch"] = [None, ConflictError(409, "Conflict", "modified")]
    for expected in (ForbiddenError, RetrySoon, ForbiddenError):
        with pytest.raises(expected):
            world.pass_over()
    assert "exceeded quota" in world.condition("ClusterReady")[2]


def test_a_pod_that_ends_whenever_it_is_made_costs_few_clusters_and_why_is_told():
    world = World()
    world.submit(preRunningDeadlineSeconds=60)
    ended = {"terminated": {"reason": "Error", "exitCode": 3, "message": "no weights"}}
    broken = {"phase": "Failed", "initContainerStatuses": [{"name": "fetch", "state": ended}]}
    why, made = "init container `fetch`: Error, exit code 3: no weights", set()
    for seconds in range(0, 66, 2):
        world.later(2)
        for name in world.clusters():
            made.add(name)
            labels = {"ray.io/cluster": name, "ray.io/group": "headgroup"}
            meta = {"name": f"{name}-head", "labels": labels}
            world.kube.put(PODS, {"metadata": meta, "spec": {"restartPolicy": "Never"}, "status": broken})
        if seconds == 10:
            assert world.condition("Training")[1] == "BackingOff"
            assert why in world.condition("Training")[2]
    assert made == {"math-1", "math-2", "math-3"}
    assert world.condition("Failed")[1] == "PreRunningDeadlineExceeded"
    assert why in world.condition("Failed")[2]
    assert world.clusters() == []


def test_a_head_that_failed_is_looked_at_before_it_is_deleted(world):
    world.settle()
    ended = {"terminated": {"reason": "Error", "exitCode": 3, "message": "no weights"}}
    broken = {"phase": "Failed", "initContainerStatuses": [{"name": "fetch", "state": ended}]}
    meta = {"name": "math-1-head", "labels": {"ray.io/cluster": "math-1", "ray.io/group": "headgroup"}}
    world.kube.put(PODS, {"metadata": meta, "spec": {"restartPolicy": "Never"}, "status": broken})
    world.set_cluster("math-1", ready=0, head=False, reason="PodFailed")
    world.settle()
    [failure] = world.status()["failures"]
    assert failure["reason"] == "PodFailed"
    assert "exit code 3: no weights" in failure["message"]
