"""When a finished job is removed."""

from datetime import datetime

from rlhf_api.status import RLHFJobStatus

from rlhf_operator.observe import parse_time


def seconds_to_live(ttl_seconds: int | None, status: RLHFJobStatus, now: datetime) -> float | None:
    """Seconds until a finished job is to be deleted, 0 or less when it is due; None if it stays."""
    if ttl_seconds is None or status.completion_time is None:
        return None
    return ttl_seconds - (now - parse_time(status.completion_time)).total_seconds()
