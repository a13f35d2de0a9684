"""Waiting for the calls of a group, and telling what went wrong in words.

The first failure ends the wait: ranks that stand in a collective would wait for the failed one. A failure that may only
follow from another rank's, such as a connection that its peer closed, gives the others a moment to show the cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rlhf_runtime.errors import InfrastructureError, RLHFError

_CAUSE_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Member:
    """One worker as messages name it."""

    group: str
    rank: int
    node: str
    """Address of its node."""
    pid: int | None = None

    def __str__(self) -> str:
        pid = "not started" if self.pid is None else f"pid {self.pid}"
        return f"group `{self.group}`, rank {self.rank} ({pid} on node {self.node})"


def gather(refs: Sequence[ray.ObjectRef], members: Sequence[Member]) -> list[Any]:
    """The results of one call a member, in order.

    Raises:
        RLHFError: as a worker raised it, with its plain message.
        InfrastructureError: naming a worker that died.
        Exception: whatever else a worker raised; the remote traceback is its `__cause__`.
    """
    owners = dict(zip(refs, members, strict=True))
    results: dict[ray.ObjectRef, Any] = {}
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        for ref in done:
            try:
                results[ref] = ray.get(ref)
            except RayError as error:
                raise _cause(error, ref, pending, owners) from error
    return [results[ref] for ref in refs]


def _cause(
    error: RayError, ref: ray.ObjectRef, pending: list[ray.ObjectRef], owners: dict[ray.ObjectRef, Member]
) -> Exception:
    """What the driver raises for a failure: what the rank raised, or another rank's failure that explains it."""
    if _is_certain(error):
        return _in_words(error, owners[ref])
    late, _ = ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_GRACE_SECONDS) if pending else ([], [])
    for other in late:
        try:
            ray.get(other)
        except RayError as other_error:
            if _is_certain(other_error):
                return _in_words(other_error, owners[other])
    return _in_words(error, owners[ref])


def _is_certain(error: RayError) -> bool:
    """Whether this is no mere consequence: an error of ours, or the death of the worker itself."""
    return isinstance(_innermost(error), RLHFError) or not isinstance(error, RayTaskError)


def _innermost(error: RayError) -> Any:
    """What was raised first, where workers called or waited for workers."""
    cause: Any = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause


def _in_words(error: RayError, member: Member) -> Exception:
    """What a worker raised; of a worker's death, what tells people."""
    cause = _innermost(error)
    if isinstance(cause, Exception) and not isinstance(cause, RayError):
        return cause
    got = "a dead worker" if cause is error else "a failed call to another worker"
    return InfrastructureError(
        f"{member}: got {got} ({_reason(cause)}); expected an answer. Fix: look in the node's logs for what ended it, "
        f"such as memory running out"
    )


def _reason(error: object) -> str:
    """Ray's own words without its lists of ids and guesses."""
    text = " ".join(str(error).split())
    return text.split("The actor is dead because ")[-1].split("Some common causes")[0].strip(" .")
