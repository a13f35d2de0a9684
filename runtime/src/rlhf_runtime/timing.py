"""Where the time of a step went, as the workers measured it."""

from collections.abc import Mapping, Sequence

from rlhf_runtime.single_controller.calls import Span

PHASE_OF: Mapping[str, str] = {
    "generate": "rollout",
    "compute_log_probs": "logprob",
    "compute_values": "value",
    "score": "reward",
    "update": "update",
    "pause": "sync",
    "send_weights": "sync",
    "transfer_weights": "sync",
    "publish_weights": "sync",
    "received_weights": "sync",
    "resume": "sync",
}
"""The phase of a step that a worker's method belongs to."""


def phase_seconds(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    """Seconds of each phase, from the first worker's start to the last one's end.

    Phases that run beside each other add up to more than the step.

    Args:
        spans: The workers' spans of a step.
        start: When the step began, in seconds since the epoch.
        end: When it ended.

    Returns:
        Seconds by phase; of the whole as `step`; and as `driver` those of it in which no worker worked.
    """
    by_phase: dict[str, list[Span]] = {}
    for span in spans:
        if span.method in PHASE_OF:
            by_phase.setdefault(PHASE_OF[span.method], []).append(span)
    phases = {phase: max(span.end for span in own) - min(span.start for span in own) for phase, own in by_phase.items()}
    return phases | {"step": end - start, "driver": end - start - _busy(spans, start, end)}


def _busy(spans: Sequence[Span], start: float, end: float) -> float:
    """Seconds between start and end in which any span lasts."""
    busy, reached = 0.0, start
    for span in sorted(spans, key=lambda span: span.start):
        begin, stop = max(span.start, reached), min(span.end, end)
        busy += max(stop - begin, 0.0)
        reached = max(reached, stop)
    return busy
