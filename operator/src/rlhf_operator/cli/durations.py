"""Lengths of time as people write and read them. Pure."""

import re
from datetime import datetime

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def age(time: str | None, now: datetime) -> str:
    """How long ago an RFC 3339 time was, such as `45s`, `12m`, `5h10m` or `3d4h`; `-` for none."""
    if not time:
        return "-"
    seconds = max(int((now - datetime.fromisoformat(time)).total_seconds()), 0)
    days, hours, minutes = seconds // 86400, seconds // 3600, seconds // 60
    if days >= 2:
        return f"{days}d{_more(hours % 24, 'h')}"
    if hours >= 2:
        return f"{hours}h{_more(minutes % 60, 'm')}"
    if minutes >= 2:
        return f"{minutes}m{_more(seconds % 60, 's')}" if minutes < 10 else f"{minutes}m"
    return f"{seconds}s"


def _more(count: int, unit: str) -> str:
    return f"{count}{unit}" if count else ""


def seconds_in(text: str) -> float:
    """The seconds of `30`, `90s`, `10m` or `1h30m`.

    Raises:
        ValueError: for anything else.
    """
    if text.isdecimal():
        return float(text)
    parts = re.findall(r"(\d+)([dhms])", text)
    if not parts or "".join(f"{count}{unit}" for count, unit in parts) != text:
        raise ValueError(f"`{text}` is no duration: write such as 90s, 10m or 1h30m")
    return float(sum(int(count) * UNITS[unit] for count, unit in parts))
