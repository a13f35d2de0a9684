"""The small policies: suspension, time to live, edits."""

from operator_values import at, cluster, condition, status, terms
from rlhf_operator.policies.edits import must_be_read
from rlhf_operator.policies.suspend import suspension
from rlhf_operator.policies.ttl import seconds_to_live


def test_a_job_is_suspended_by_its_spec_or_by_its_queue():
    assert suspension(terms(), cluster()) is None
    assert suspension(terms(), None) is None
    by_spec = suspension(terms(suspend=True), cluster())
    assert (by_spec.reason, by_spec.keeps_cluster) == ("SuspendedBySpec", False)
    by_queue = suspension(terms(), cluster(suspended=True))
    assert (by_queue.reason, by_queue.keeps_cluster) == ("SuspendedByQueue", True)


def test_a_finished_job_lives_on_for_its_time():
    done = status(completion_time="2026-01-01T00:01:00Z")
    assert seconds_to_live(100, done, at(70)) == 90
    assert seconds_to_live(0, done, at(60)) == 0
    assert seconds_to_live(None, done, at(70)) is None
    assert seconds_to_live(100, status(), at(70)) is None


def test_a_spec_is_read_again_when_it_changed_or_was_refused():
    accepted = status(condition("Accepted", True), observed_generation=3)
    assert not must_be_read(accepted, 3)
    assert must_be_read(accepted, 4)
    assert must_be_read(status(condition("Accepted", False), observed_generation=3), 3)
    assert must_be_read(status(), 1)
