"""Whether the ranks of a role still agree. What they all hold, they hold bit for bit, as long as nothing is broken.

    update -> metrics by rank ─┐
    digests, every N steps ────┴─ require_agreement

A sharded parameter has one copy and so nothing to differ from; what can differ is what each rank is given when it is
gathered, parameters and buffers that every rank has whole, and the count of optimizer steps: the digests show that.
The metrics of an update, gradient norms among them, are reduced over the ranks before they are reported. They differ
where a reduction gave ranks different results or ranks took another number of steps; a rank whose own gradient is wrong
they do not show, as it is in the sum of all.
"""

from collections.abc import Mapping, Sequence

from rlhf_runtime.errors import DesyncError

Number = int | float


def require_agreement(role: str, reports: Sequence[Mapping[str, Number]]) -> None:
    """Compare what the ranks of a role report of themselves, bit for bit.

    Args:
        role: The role, for the message.
        reports: A report a rank, in rank order: the metrics of an update, or `TorchEngine.digests`.

    Raises:
        DesyncError: naming the first entry that differs and the ranks that most others contradict.
    """
    for name in dict.fromkeys(name for report in reports for name in report):
        values = [_bits(report.get(name)) for report in reports]
        if len(set(values)) == 1:
            continue
        # Where as many say the one as the other, rank 0 is taken to be right.
        usual = max(values, key=values.count)
        odd = [rank for rank, value in enumerate(values) if value != usual]
        right = values.index(usual)
        raise DesyncError(
            f"{role}: got {name} {reports[odd[0]].get(name)} on rank {', '.join(map(str, odd))}; expected "
            f"{reports[right].get(name)}, as on rank {right}, bit for bit. Fix: start again from the latest "
            f"checkpoint; if it repeats, leave out the node of that rank"
        )


def _bits(value: Number | None) -> str:
    """What is equal where the bits are: not so for -0.0 and 0.0, but for NaN."""
    return value.hex() if isinstance(value, float) else repr(value)
