"""How a status is read, whichever release of the operator wrote it."""

import pytest
from rlhf_api import SpecError
from rlhf_api.status import PoolStatus, RLHFJobStatus

FAILURE = {"kind": "Program", "cluster": 1, "try": 2, "reason": "R", "message": "m", "time": "2026-01-01T00:00:00Z"}


def test_fields_of_another_release_are_dropped_at_every_depth():
    told = RLHFJobStatus.read({
        "phase": "Training", "mood": {"of": "the operator"}, "try": 2,
        "pools": [{"name": "a", "desired": 2, "ready": 1, "warm": True}],
        "progress": {"step": 3, "steps": 9, "reward": 1, "entropy": 0.5},
        "failures": [{**FAILURE, "node": "n1"}],
    })  # fmt: skip
    assert (told.phase, told.try_, told.pools) == ("Training", 2, [PoolStatus(name="a", desired=2, ready=1)])
    assert told.progress is not None
    assert (told.progress.step, told.progress.reward, told.failures[0].try_) == (3, 1.0, 2)
    assert "entropy" not in told.model_dump_json()


@pytest.mark.parametrize("nothing", [None, {}])
def test_a_job_that_was_not_looked_at_has_an_empty_status(nothing):
    assert RLHFJobStatus.read(nothing) == RLHFJobStatus()


def test_what_cannot_be_read_is_refused_with_every_place():
    with pytest.raises(SpecError) as refused:
        RLHFJobStatus.read({"phase": "Dreaming", "progress": {"step": "three", "steps": 9}})
    assert [error.path for error in refused.value.errors] == ["status.phase", "status.progress.step"]
    with pytest.raises(SpecError, match="status: got a list; expected a mapping"):
        RLHFJobStatus.read([])
