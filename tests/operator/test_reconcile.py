"""The life of a job, pass by pass, in a world in memory: what is made, what is told, what is written."""

import copy
import itertools

import pytest
from operator_world import NAMESPACE, World
from rlhf_api.run_end import RunEnd
from rlhf_api.status import Progress
from rlhf_operator.kube import (
    EVENTS,
    NODES,
    RAYCLUSTERS,
    RLHFJOBS,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from rlhf_operator.observe import DriverView
from rlhf_operator.reconcile import merge_patch
from rlhf_operator.store import keep_job
from rlhf_operator.work_queue import RetrySoon

DRIVER = "python -m rlhf_runtime /etc/rlhf/runtime.json"


@pytest.fixture
def world() -> World:
    made = World()
    made.submit()
    return made


def fail(world: World, code: int | None, **changes) -> None:
    """The driver's current try ends."""
    world.rays.set(world.status()["submissionId"], DriverView("failed", exit_code=code, **changes))
    world.settle()


def test_a_job_becomes_a_cluster_that_trains_and_goes(world):
    world.settle()
    assert (world.clusters(), world.status()["phase"]) == (["math-1"], "Provisioning")
    assert world.rays.submitted == [], "submitted before the cluster was ready"
    world.train()
    assert world.rays.submitted == [("math-1-1", f"{DRIVER} --try math-1-1")]
    assert world.status()["phase"] == "Training"
    assert world.status()["poolSummary"] == "train 2/2, rollout 1/1"
    world.rays.set("math-1-1", DriverView("succeeded"))
    world.later(30)
    assert world.condition("Succeeded")[:2] == ("True", "Completed")
    assert (world.clusters(), world.status()["phase"]) == ([], "Succeeded")
    assert world.events() == ["Creating", "AllPodsReady", "Submitting", "DriverRunning", "Completed"]


def test_every_child_goes_with_its_job(world):
    world.settle()
    uid = world.kube.peek(RLHFJOBS, "math")["metadata"]["uid"]
    (made,) = world.kube.all(RAYCLUSTERS)
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (uid, True)
    assert not owner.get("blockOwnerDeletion")
    assert "finalizers" not in made["metadata"]
    world.kube.remove(RLHFJOBS, "math")
    assert world.clusters() == []


@pytest.mark.parametrize("stage", ["waiting", "training", "finished"])
def test_a_steady_job_is_not_written_and_costs_no_request_but_rays(world, stage):
    world.settle()
    if stage != "waiting":
        world.train()
    if stage == "finished":
        world.rays.set("math-1-1", DriverView("succeeded"))
        world.settle()
    world.later(60)
    before = len(world.kube.writes)
    for _ in range(5):
        world.later(60)
    assert world.kube.writes[before:] == []


def test_a_new_process_writes_nothing_about_what_it_finds(world):
    world.train()
    before = len(world.kube.writes)
    world.start_operator()
    world.settle()
    assert world.kube.writes[before:] == []
    assert len(world.rays.submitted) == 1


def test_a_spec_that_cannot_be_run_is_told_with_every_problem_and_makes_nothing():
    world = World()
    world.submit(rollout={"samplesPerPrompt": 1}, backoffLimit="many")
    world.settle()
    assert world.condition("Accepted")[:2] == ("False", "InvalidSpec")
    assert "spec.backoffLimit: got 'many'" in world.condition("Accepted")[2]
    world.edit(backoffLimit=1)
    world.settle()
    assert "spec.rollout.samplesPerPrompt: got 1" in world.condition("Accepted")[2]
    assert (world.clusters(), world.status()["phase"]) == ([], "Pending")
    world.edit(rollout={"samplesPerPrompt": 4})
    world.settle()
    assert (world.condition("Accepted")[0], world.clusters()) == ("True", ["math-1"])
    assert world.status()["observedGeneration"] == 3


def test_bundles_that_no_node_of_the_pool_holds_are_refused_before_any_child_exists():
    world = World()
    manifest_groups = [
        {"name": "actor", "pool": "train", "roles": ["policy", "reference"], "workers": 4, "strategy": "STRICT_PACK"},
        {"name": "rollout", "pool": "rollout", "roles": ["rollout"], "workers": 2},
        {"name": "reward", "pool": "train", "roles": ["reward"], "workers": 1, "gpusPerWorker": 0},
    ]
    world.submit(placement={"groups": manifest_groups})
    world.settle()
    assert world.condition("Accepted")[:2] == ("False", "InvalidSpec")
    assert "got 4 bundles of 1 GPU with STRICT_PACK on one node; expected at most 2" in world.condition("Accepted")[2]
    assert world.clusters() == []


def test_too_few_nodes_are_a_warning(world):
    for index in range(3):
        world.kube.remove(NODES, f"node-{index}", None)
    world.kube.put(NODES, {"metadata": {"name": "node-3"}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}, None)
    world.settle()
    assert world.condition("PlacementFeasible")[:2] == ("False", "TooFewNodes")
    assert world.clusters() == ["math-1"]


def test_in_namespaced_mode_nodes_are_not_asked_for():
    world = World(namespaces=(NAMESPACE,))
    world.submit()
    world.settle()
    assert world.condition("PlacementFeasible")[:2] == ("Unknown", "NodesUnknown")
    assert ("list", "nodes", "") not in world.kube.calls


def test_why_pods_do_not_start_is_told_within_seconds(world):
    world.settle()
    world.set_cluster("math-1", ready=0, head=False)
    waiting = {"reason": "ErrImagePull", "message": "no such image"}
    status = {"phase": "Pending", "containerStatuses": [{"name": "ray", "state": {"waiting": waiting}}]}
    world.add_pod("math-1", "math-1-head", "headgroup", status)
    world.later(5)
    _, reason, message = world.condition("ClusterReady")
    assert reason == "PodsNotStarting"
    assert "pod math-1-head: container `ray`: ErrImagePull: no such image" in message
    assert message == world.status()["message"]
    world.later(1800)
    assert world.condition("Failed")[1] == "PreRunningDeadlineExceeded"
    assert "ErrImagePull" in world.status()["message"]
    assert world.clusters() == []


def test_pods_that_come_one_by_one_are_counted_now_and_then_and_the_last_one_at_once():
    world = World()
    world.submit(nodePools=[{"name": "train", "nodes": 40, "gpusPerNode": 8}], placement=None)
    world.settle()
    before = len(world.kube.writes)
    for ready in range(1, 40):
        world.set_cluster("math-1", ready=ready)
        world.later(0.5)
    counts = [write for write in world.kube.writes[before:] if write[0] == "patch"]
    assert 3 <= len(counts) <= 5, "about one in 5 s of the 20"
    assert "of 40 workers are ready" in world.status()["message"]
    world.set_cluster("math-1", ready=40)
    world.settle()
    assert world.condition("ClusterReady")[0] == "True"


def test_a_program_that_fails_is_tried_again_on_the_same_cluster_until_its_limit():
    world = World()
    world.submit(backoffLimit=1)
    world.train()
    fail(world, 1, message="boom")
    assert (world.status()["phase"], world.condition("Training")[1]) == ("Restarting", "BackingOff")
    world.later(11)
    assert world.rays.submitted[1] == ("math-1-2", f"{DRIVER} --try math-1-2 --resume")
    assert (world.clusters(), world.status()["programFailures"]) == (["math-1"], 1)
    assert "infrastructureFailures" not in world.status()
    fail(world, 3)
    assert world.condition("Failed")[:2] == ("True", "BackoffLimitExceeded")
    assert [entry["reason"] for entry in world.status()["failures"]] == ["Unexpected", "RewardFailed"]
    assert world.clusters() == []


def test_bad_input_is_not_tried_again(world):
    world.train()
    world.rays.set("math-1-1", DriverView("failed", exit_code=2, log=RunEnd.of(2, "spec.data: got X").line({})))
    world.later(30)
    assert world.condition("Failed")[:2] == ("True", "BadInput")
    assert "spec.data: got X" in world.condition("Failed")[2]


def test_a_lost_worker_is_waited_for_and_counts_against_the_infrastructure(world):
    world.train()
    world.set_cluster("math-1", ready=2)
    fail(world, 5)
    world.later(60)
    assert len(world.rays.submitted) == 1, "submitted to a cluster that is not whole"
    world.set_cluster("math-1", ready=3)
    world.later(1)
    assert world.rays.submitted[1][0] == "math-1-2"
    assert (world.status()["infrastructureFailures"], world.clusters()) == (1, ["math-1"])
    assert "programFailures" not in world.status()


def test_a_lost_head_takes_its_cluster_with_it_and_the_next_one_resumes():
    world = World()
    world.submit(infrastructureBackoffLimit=1)
    world.train()
    world.set_cluster("math-1", ready=3, head=False, reason="HeadPodNotFound")
    world.settle()
    assert world.status()["failures"][0]["reason"] == "HeadLost"
    assert world.clusters() == []
    world.later(10)
    assert world.clusters() == ["math-2"]
    world.train()
    assert world.rays.submitted[1] == ("math-2-1", f"{DRIVER} --try math-2-1 --resume")
    world.set_cluster("math-2", ready=3, head=False, reason="HeadPodNotFound")
    world.settle()
    assert world.condition("Failed")[:2] == ("True", "BackoffLimitExceeded")


def test_a_blip_of_the_job_api_fails_nothing(world):
    world.train()
    world.rays.away = True
    world.later(30)
    assert (world.status()["phase"], world.condition("Training")[0]) == ("Training", "True")
    world.rays.away = False
    world.later(30)
    assert "unreachableSince" not in world.status()
    assert world.status()["phase"] == "Training"
    assert world.clusters() == ["math-1"]


def test_a_silence_that_has_several_reasons_is_told_once(world):
    world.train()
    reasons = itertools.cycle(["it answered 503", "no connection could be made", "no answer within 10 s"])

    async def away(_head, _submission_id):
        return DriverView("unreachable", next(reasons))

    world.rays.look = away
    world.later(1)
    before = len(world.kube.writes)
    for _ in range(20):
        world.later(5)
    assert world.kube.writes[before:] == []
    assert world.status()["message"] == "Training, though Ray's job API does not answer: it answered 503."


def test_patience_with_the_job_api_is_bounded_and_a_resubmission_does_not_reset_it(world):
    world.train()
    world.rays.away = True
    world.settle()
    since = world.status()["unreachableSince"]
    for _ in range(9):
        world.later(30)
        assert world.status()["unreachableSince"] == since
    world.later(40)
    assert world.status()["failures"][0]["reason"] == "JobApiUnreachable"
    world.later(10)
    assert world.clusters() == ["math-2"]


def test_suspension_gives_machines_back_and_counts_as_no_failure(world):
    world.train()
    world.edit(suspend=True)
    world.settle()
    assert (world.status()["phase"], world.clusters()) == ("Suspended", [])
    assert world.condition("Suspended")[:2] == ("True", "SuspendedBySpec")
    world.later(100_000)
    world.edit(suspend=False)
    world.settle()
    assert (world.status()["phase"], world.clusters()) == ("Provisioning", ["math-2"])
    world.train()
    assert world.rays.submitted[1][0] == "math-2-1"
    assert world.status()["failures"] == []


def test_a_job_that_starts_suspended_makes_nothing_until_it_is_resumed():
    world = World()
    world.submit(suspend=True)
    world.settle()
    assert (world.status()["phase"], world.clusters()) == ("Suspended", [])
    world.edit(suspend=False)
    world.settle()
    assert world.clusters() == ["math-1"]


def test_a_queue_may_suspend_the_cluster_and_its_write_is_not_reverted(world):
    world.train()
    held = copy.deepcopy(world.kube.peek(RAYCLUSTERS, "math-1"))
    held["spec"]["suspend"] = True
    world.kube.put(RAYCLUSTERS, held)
    world.settle()
    assert (world.status()["phase"], world.condition("Suspended")[1]) == ("Suspended", "SuspendedByQueue")
    world.later(10_000)
    assert world.kube.peek(RAYCLUSTERS, "math-1")["spec"]["suspend"] is True
    held["spec"]["suspend"] = False
    world.kube.put(RAYCLUSTERS, held)
    world.train()
    assert world.rays.submitted[1][0] == "math-1-2"
    assert (world.status()["phase"], world.status()["failures"]) == ("Training", [])


def test_deadlines_end_a_job_that_trains():
    world = World()
    world.submit(activeDeadlineSeconds=100)
    world.train()
    world.later(101)
    assert world.condition("Failed")[1] == "ActiveDeadlineExceeded"
    assert world.clusters() == []


def test_limits_may_be_changed_while_a_job_runs(world):
    world.train()
    world.edit(activeDeadlineSeconds=10)
    world.later(11)
    assert world.condition("Failed")[1] == "ActiveDeadlineExceeded"
    assert world.status()["observedGeneration"] == 2


def test_what_has_finished_stays_finished_until_its_time_has_come():
    world = World()
    world.submit(ttlSecondsAfterFinished=100)
    world.train()
    world.rays.set("math-1-1", DriverView("succeeded"))
    world.settle()
    world.edit(suspend=True)
    world.later(60)
    assert world.status()["phase"] == "Succeeded"
    world.later(60)
    assert world.kube.all(RLHFJOBS) == []


def test_progress_is_told_as_the_driver_tells_it(world):
    world.train()
    world.rays.set("math-1-1", DriverView("running", progress=Progress(step=3, steps=10, reward=0.5)))
    world.later(30)
    assert world.status()["progress"] == {"step": 3, "steps": 10, "reward": 0.5}
    fail(world, 5)
    assert world.status()["failures"][0]["step"] == 3


def test_a_next_try_shows_nothing_of_what_the_last_one_had_measured(world):
    world.train()
    measured = Progress(step=3, steps=10, reward=0.5, last_checkpoint="/checkpoints/step-3", eta_seconds=70)
    world.rays.set("math-1-1", DriverView("running", progress=measured))
    world.later(30)
    fail(world, 1)
    world.later(60)
    world.rays.set("math-1-2", DriverView("running", progress=Progress(step=0, steps=10)))
    world.later(30)
    assert (world.status()["try"], world.status()["progress"]) == (2, {"step": 0, "steps": 10})
    before = len(world.kube.writes)
    world.later(60)
    assert world.kube.writes[before:] == []


@pytest.mark.parametrize(
    ("old", "new", "patch"),
    [
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"b": 3}),
        ({"a": 1, "b": 2}, {"a": 1}, {"b": None}),
        ({"a": {"b": {"c": 1, "d": 2}, "e": 3}}, {"a": {"b": {"c": 1}, "e": 3}}, {"a": {"b": {"d": None}}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": None}}),
        ({"a": {"b": 1}}, {"a": {"b": 1}}, {}),
        ({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}, {"a": [{"b": 1}]}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": 1}, {"a": 1}),
        ({"a": None}, {"b": {}}, {"a": None, "b": {}}),
    ],
)
def test_a_merge_patch_has_what_differs_and_null_for_what_goes(old, new, patch):
    assert merge_patch(old, new) == patch


def test_how_far_a_run_got_is_told_by_its_last_word(world):
    world.train()
    world.rays.set("math-1-1", DriverView("running", progress=Progress(step=3, steps=10, reward=0.5)))
    world.later(30)
    end = RunEnd.of(0).model_copy(update={"progress": Progress(step=10, steps=10, reward=0.123456)})
    world.rays.set("math-1-1", DriverView("succeeded", log=f"trained\n{end.line({'steps': 10})}\n"))
    world.settle()
    assert world.status()["phase"] == "Succeeded"
    assert world.status()["progress"] == {"step": 10, "steps": 10, "reward": 0.1235}


def test_a_dying_cluster_of_the_same_name_is_waited_for(world):
    foreign = {"kind": "RayCluster", "metadata": {"name": "math-1", "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    world.kube.put(RAYCLUSTERS, foreign | {"spec": {}})
    world.settle()
    assert world.condition("ClusterReady")[:2] == ("False", "NameTaken")
    world.kube.remove(RAYCLUSTERS, "math-1")
    world.settle()
    assert world.kube.peek(RAYCLUSTERS, "math-1")["spec"]["workerGroupSpecs"]
    assert world.status()["failures"] == []


def test_anothers_cluster_of_the_same_name_is_left_alone(world):
    world.kube.put(RAYCLUSTERS, {"kind": "RayCluster", "metadata": {"name": "math-1"}, "spec": {"theirs": True}})
    world.settle()
    assert world.condition("ClusterReady")[:2] == ("False", "NameTaken")
    assert world.kube.peek(RAYCLUSTERS, "math-1")["spec"] == {"theirs": True}


def test_what_the_api_server_refuses_is_told_and_tried_again(world):
    world.kube.failures["apply"] = [ForbiddenError(403, "Forbidden", "exceeded quota"), None] * 2
    world.settle()
    assert world.clusters() == ["math-1"]
    assert "CreateRefused" in world.events()


def test_without_kuberay_its_absence_is_told(world):
    world.kube.denied["create", RAYCLUSTERS] = NotFoundError(404, "NotFound", "no such kind")
    for _ in range(2):
        with pytest.raises(NotFoundError):
            world.pass_over()
    assert "RayCluster is not installed" in world.condition("ClusterReady")[2]


def test_a_status_that_another_wrote_in_between_is_read_again(world):
    world.kube.failures["patch"] = [ConflictError(409, "Conflict", "modified")]
    with pytest.raises(RetrySoon):
        world.pass_over()
    assert world.clusters() == [], "acted on what it could not tell"
    world.settle()
    assert world.clusters() == ["math-1"]


def test_an_event_that_is_lost_loses_nothing_else(world):
    world.kube.denied["create", EVENTS] = UnavailableError(500, "InternalError", "away")
    world.train()
    assert (world.status()["phase"], world.events()) == ("Training", [])


def test_a_cluster_whose_number_the_job_has_not_reached_makes_it_be_read_again(world):
    """A job that is remembered from before its last cluster must not take that one for a stray."""
    world.train()
    old = world.kube.peek(RLHFJOBS, "math")
    world.set_cluster("math-1", ready=3, head=False, reason="HeadPodNotFound")
    world.settle()
    world.later(10)
    assert world.clusters() == ["math-2"]
    world.store._jobs.clear()
    world.store.see_job(keep_job(old))
    with pytest.raises(RetrySoon):
        world.pass_from_memory()
    assert world.clusters() == ["math-2"]


def test_a_lost_cluster_that_takes_its_time_to_go_is_waited_for(world):
    """Its pods hold the machines that the next one needs."""
    world.train()
    lingering = copy.deepcopy(world.kube.peek(RAYCLUSTERS, "math-1"))
    lingering["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.kube.put(RAYCLUSTERS, lingering)
    world.later(60)
    assert world.clusters() == ["math-1"]
    assert world.condition("ClusterReady")[1] == "WaitingForPredecessor"
    world.kube.remove(RAYCLUSTERS, "math-1")
    world.later(60)
    assert world.clusters() == ["math-2"]
