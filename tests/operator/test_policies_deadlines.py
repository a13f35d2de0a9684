"""How long a job may take."""

from operator_values import at, condition, failure, status, terms
from rlhf_operator.policies.deadlines import deadlines

WAITS = condition("Training", False)


def left(asked, told, seconds):
    return {deadline.reason: deadline.seconds_left for deadline in deadlines(asked, told, at(seconds))}


def test_a_job_that_trains_has_its_active_deadline_alone():
    asked = terms(active_deadline_seconds=100)
    assert left(asked, status(condition("Training", True)), 30) == {"ActiveDeadlineExceeded": 70}
    assert left(terms(), status(condition("Training", True)), 30) == {}


def test_what_does_not_train_has_to_do_so_in_time():
    assert left(terms(pre_running_deadline_seconds=60), status(WAITS), 90) == {"PreRunningDeadlineExceeded": -30}


def test_a_cluster_that_was_lost_has_its_time_from_the_loss_on():
    lost = status(condition("Training", False, since=5000))
    assert left(terms(pre_running_deadline_seconds=60), lost, 5010) == {"PreRunningDeadlineExceeded": 50}


def test_suspended_time_does_not_count():
    asked = terms(active_deadline_seconds=10, pre_running_deadline_seconds=10)
    assert left(asked, status(WAITS, condition("Suspended", True)), 1000) == {}
    resumed = status(WAITS, condition("Suspended", False, since=990), start_time="2026-01-01T00:16:30Z")
    assert left(asked, resumed, 1000) == {"ActiveDeadlineExceeded": 0, "PreRunningDeadlineExceeded": 0}


def test_the_message_says_what_was_waited_for():
    told = status(WAITS, condition("ClusterReady", False, message="pod a: ErrImagePull"))
    (deadline,) = deadlines(terms(pre_running_deadline_seconds=1), told, at(5))
    assert "preRunningDeadlineSeconds of 1" in deadline.message
    assert "ErrImagePull" in deadline.message


def test_the_message_says_what_ended_the_last_try_unless_the_wait_tells_it():
    def message(waits):
        told = status(WAITS, condition("ClusterReady", False, message=waits), failures=[failure()])
        return next(deadlines(terms(pre_running_deadline_seconds=1), told, at(5))).message

    assert message("RayCluster a is going.").endswith("RayCluster a is going. Before that, R: m")
    assert message("The last one ended with R: m").endswith("ended with R: m")
