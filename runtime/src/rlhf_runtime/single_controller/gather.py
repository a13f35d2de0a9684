"""Waiting for the calls of a group, and telling what went wrong in words.

The first failure ends the wait: ranks that stand in a collective would wait for the failed one. A failure that may
only follow from another's, such as a connection that its peer closed, is told as that other's: the health monitor knows
which worker of any group failed first; without it, the other ranks get a moment to show the cause.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from rlhf_runtime.errors import InfrastructureError, RLHFError
from rlhf_runtime.single_controller.health import HealthMonitor
from rlhf_runtime.single_controller.ray_errors import exit_known, pid_of, reason
from rlhf_runtime.single_controller.verdict import Member, Verdict

_CAUSE_GRACE_SECONDS = 5.0


def gather(refs: Sequence[ray.ObjectRef], members: Sequence[Member], health: HealthMonitor | None = None) -> list[Any]:
    """The results of one call a member, in order.

    Args:
        refs: The calls.
        members: Whose they are, in the same order.
        health: Knows what became of any worker.

    Raises:
        RLHFError: as a worker raised it, with its plain message.
        InfrastructureError: naming the worker whose death or standstill is the cause, whichever group it is in.
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
                raise _cause(error, ref, pending, owners, health) from error
    return [results[ref] for ref in refs]


def _cause(
    error: RayError,
    ref: ray.ObjectRef,
    pending: list[ray.ObjectRef],
    owners: dict[ray.ObjectRef, Member],
    health: HealthMonitor | None,
) -> Exception:
    """What the driver raises for a failure: what the rank raised, or another worker's failure that explains it."""
    if _is_own(error):
        return _in_words(error, owners[ref])
    if health is not None and (verdict := health.verdict(_CAUSE_GRACE_SECONDS)):
        return verdict.error(_what_ray_knows(error, owners[ref], verdict))
    if health is not None and (killed := health.killed_children(owners[ref])):
        return Verdict(owners[ref], f"a dead child process ({'; '.join(killed)}), then {_innermost(error)}").error()
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


def _is_own(error: RayError) -> bool:
    """Whether the worker itself knows what is wrong, and it is nothing that another worker's end could have done."""
    cause = _innermost(error)
    return isinstance(cause, RLHFError) and not isinstance(cause, InfrastructureError)


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
    dead = cause is error
    got = "a dead worker" if dead else "a failed call to another worker"
    if dead and member.pid is None:
        member = replace(member, pid=pid_of(error))
    return Verdict(member, f"{got} ({reason(cause)})").error()


def _what_ray_knows(error: RayError, member: Member, verdict: Verdict) -> str:
    """What else Ray knows of the end of the worker that the verdict names."""
    cause = _innermost(error)
    named = verdict.member
    same = cause is error and named is not None and (member.group, member.rank) == (named.group, named.rank)
    # Memory is the node's: Ray ends several workers at once, and tells all of them why.
    return exit_known(cause) if same or isinstance(cause, OutOfMemoryError) else ""
