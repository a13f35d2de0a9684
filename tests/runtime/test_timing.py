import pytest
from rlhf_runtime.single_controller.calls import Span
from rlhf_runtime.timing import phase_seconds


def span(method: str, start: float, end: float, rank: int = 0) -> Span:
    return Span("group", None, method, rank, start, end)


def test_a_phase_lasts_from_its_first_worker_to_its_last():
    spans = [
        span("generate", 1, 3),
        span("generate", 2, 6, rank=1),
        span("update", 6, 7),
        span("received_weights", 7, 8),
    ]
    seconds = phase_seconds(spans, start=0, end=10)
    assert seconds == pytest.approx({"rollout": 5, "update": 1, "sync": 1, "step": 10, "driver": 3})


def test_phases_beside_each_other_add_up_to_more_than_the_step():
    spans = [span("compute_log_probs", 0, 4), span("compute_values", 0, 3), span("score", 1, 4)]
    seconds = phase_seconds(spans, start=0, end=4)
    assert seconds["logprob"] + seconds["value"] + seconds["reward"] == pytest.approx(10)
    assert seconds["driver"] == pytest.approx(0)


def test_another_nodes_clock_makes_no_time_out_of_nothing():
    assert phase_seconds([span("update", -5, 20)], start=0, end=10)["driver"] == pytest.approx(0)
