"""Rows of different lengths, cut into batches of little padding."""

from collections.abc import Sequence


def cut(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows by length, cut so that rows times the longest stays within `tokens`; a longer row stands alone."""
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and longest * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = lengths[row]
    return batches
