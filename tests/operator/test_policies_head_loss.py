"""When a cluster counts as lost."""

import pytest
from operator_values import at, cluster, condition, status
from rlhf_operator.observe import DriverView, PodView
from rlhf_operator.policies.head_loss import loss

READY = status(
    condition("ClusterReady", True, "AllPodsReady"),
    condition("Training", True, "DriverRunning"),
    ray_cluster="math-1",
    submission_id="math-1-1",
)
NO_HEAD = {"conditions": {"HeadPodReady": False}, "head_reason": "HeadPodNotFound"}


def reason(told, seen, driver=None, seconds=0.0, silent_since=0.0, pods=()):
    found = loss(told, seen, driver, at(seconds), 300, at(silent_since), pods)
    return found and found.reason


def test_a_healthy_cluster_is_not_lost():
    assert reason(READY, cluster(), DriverView("running")) is None


def test_a_head_without_a_pod_is_lost_once_it_was_there():
    assert reason(READY, cluster(**NO_HEAD)) == "HeadLost"
    starting = cluster({"HeadPodReady": False, "RayClusterProvisioned": False}, head_reason="HeadPodNotFound")
    assert reason(READY, starting) is None


def test_a_probe_that_fails_loses_nothing():
    assert reason(READY, cluster({"HeadPodReady": False}, head_reason="ContainersNotReady")) is None


@pytest.mark.parametrize("told", ["Creating", "CreateRefused", "NameTaken"])
def test_what_was_never_seen_is_not_lost(told):
    assert reason(status(condition("ClusterReady", False, told), ray_cluster="math-1"), None) is None


def test_a_cluster_that_another_deletes_is_lost():
    assert reason(READY, None) == "ClusterLost"
    assert reason(READY, cluster(deleting=True)) == "ClusterLost"


def test_a_try_that_ray_forgot_means_a_new_head():
    assert reason(READY, cluster(), DriverView("unknown")) == "HeadRestarted"
    submitting = status(condition("Training", False, "Submitting"), ray_cluster="math-1", submission_id="math-1-1")
    assert reason(submitting, cluster(), DriverView("unknown")) is None


def test_a_job_api_that_is_away_is_waited_for_so_long_and_no_longer():
    away = READY.model_copy(update={"unreachable_since": "2026-01-01T00:00:00Z"})
    assert reason(away, cluster(), DriverView("unreachable"), 299) is None
    assert reason(away, cluster(), DriverView("unreachable"), 300) == "JobApiUnreachable"
    assert reason(away, cluster(), DriverView("unreachable"), 699, silent_since=400) is None
    assert reason(away, cluster(), DriverView("unreachable"), 700, silent_since=400) == "JobApiUnreachable"
    assert reason(away, cluster(), DriverView("unreachable"), 299, silent_since=-400) is None


def test_a_cluster_whose_pod_ended_before_it_was_whole_is_given_up():
    pods = [PodView("w", "train", False, None), PodView("h", "headgroup", False, "Error, exit code 3", ended=True)]
    starting = cluster({"HeadPodReady": False, "RayClusterProvisioned": False})
    assert reason(READY, starting, pods=pods) == "PodFailed"
    assert reason(READY, starting, pods=pods[:1]) is None
    assert reason(READY, cluster({"HeadPodReady": False}), pods=pods) is None
