"""How a call on a group becomes calls on its workers, and their results one result.

    @register marks a method -> MODES[mode].dispatch(arguments) -> one call a rank -> MODES[mode].collect(results)

Pure: nothing here knows of Ray, and torch is loaded with the first batch, so worker classes may import it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

_REGISTRATION = "__rlhf_registration__"

Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch(Enum):
    """What each rank is given, and what the caller gets back."""

    ONE_TO_ALL = "one_to_all"
    """Every rank the same arguments; a list of results by rank."""
    ALL_TO_ALL = "all_to_all"
    """Arguments as given: whole, or one a rank where wrapped in `PerRank`; a list of results by rank."""
    DP_COMPUTE = "dp_compute"
    """Each argument a list with one item a rank; a list of results by rank."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """`DataProto` arguments padded and cut into one chunk a rank, others whole; `DataProto` results joined in order
    without the padding, others as a list by rank."""
    RANK_ZERO = "rank_zero"
    """Arguments whole; the result of rank 0 alone."""


class Execute(Enum):
    """Which ranks run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """What `register` says of a method."""

    dispatch_mode: Dispatch
    execute_mode: Execute
    blocking: bool


@dataclass(frozen=True)
class PerRank:
    """One value a rank, in rank order."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Shared:
    """One value for all ranks."""

    value: Any


@dataclass(frozen=True)
class Call:
    """The arguments of one call, told apart by how they reach the ranks."""

    args: tuple[Shared | PerRank, ...]
    kwargs: dict[str, Shared | PerRank]
    rows: int = 0
    """Rows of the `DataProto` arguments once padded."""
    padding: int = 0
    """How many of them are padding, at the end."""


@dataclass(frozen=True)
class Mode:
    """The two halves of a dispatch mode."""

    dispatch: Callable[[int, tuple[Any, ...], dict[str, Any]], Call]
    """(world size, args, kwargs) -> call."""
    collect: Callable[[Call, list[Any]], Any]
    """(call, results by rank) -> what the caller gets."""


def register(
    dispatch_mode: Dispatch = Dispatch.ONE_TO_ALL,
    execute_mode: Execute | None = None,
    blocking: bool = True,
) -> Callable[[Method], Method]:
    """Make a worker's method a method of its group.

    Args:
        dispatch_mode: How arguments and results travel.
        execute_mode: Which ranks run. Default: all, or rank 0 alone under `Dispatch.RANK_ZERO`.
        blocking: Whether the call waits; otherwise it returns a future with `get()`.

    Raises:
        ValueError: when data would be spread over ranks that do not run.
    """
    if execute_mode is None:
        execute_mode = Execute.RANK_ZERO if dispatch_mode is Dispatch.RANK_ZERO else Execute.ALL
    if execute_mode is Execute.RANK_ZERO and dispatch_mode in (Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_PROTO):
        raise ValueError(f"execute_mode: got RANK_ZERO with {dispatch_mode.name}; expected ALL, as every rank has data")

    def mark(method: Method) -> Method:
        setattr(method, _REGISTRATION, Registration(dispatch_mode, execute_mode, blocking))
        return method

    return mark


def registered_methods(cls: type) -> dict[str, Registration]:
    """The methods of a worker class that `register` marked, by name."""
    found = {name: getattr(getattr(cls, name), _REGISTRATION, None) for name in dir(cls)}
    return {name: registration for name, registration in found.items() if registration is not None}


def _whole(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(tuple(map(Shared, args)), {name: Shared(value) for name, value in kwargs.items()})


def _as_given(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return _map(lambda name, value: _checked(name, value, world_size), args, kwargs)


def _one_each(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    def per_rank(name: str, value: Any) -> PerRank:
        values = value.values if isinstance(value, PerRank) else value
        if not isinstance(values, list | tuple):
            raise ValueError(f"{name}: got {type(value).__name__}; expected a list with one item a rank")
        return _checked(name, PerRank(values), world_size)

    return _map(per_rank, args, kwargs)


def _chunked(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    from rlhf_runtime.protocol import DataProto

    protos = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    lengths = {len(proto) for proto in protos}
    if len(lengths) != 1:
        got = f"DataProto of {sorted(lengths)} rows" if lengths else "no DataProto"
        raise ValueError(f"arguments: got {got}; expected at least one, all of one length")
    rows = lengths.pop()
    padding = -rows % world_size

    def chunked(name: str, value: Any) -> Shared | PerRank:
        if isinstance(value, DataProto):
            return PerRank(value.pad_to_multiple(world_size)[0].chunk(world_size))
        return _checked(name, value, world_size)

    call = _map(chunked, args, kwargs)
    return Call(call.args, call.kwargs, rows + padding, padding)


def _map(convert: Callable[[str, Any], Shared | PerRank], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(
        tuple(convert(f"argument {index}", value) for index, value in enumerate(args)),
        {name: convert(name, value) for name, value in kwargs.items()},
    )


def _checked(name: str, value: Any, world_size: int) -> Shared | PerRank:
    if not isinstance(value, PerRank):
        return Shared(value)
    if len(value.values) != world_size:
        raise ValueError(f"{name}: got {len(value.values)} items; expected {world_size}, one a rank")
    return value


def _by_rank(call: Call, results: list[Any]) -> list[Any]:
    return results


def _first(call: Call, results: list[Any]) -> Any:
    return results[0]


def _joined(call: Call, results: list[Any]) -> Any:
    from rlhf_runtime.protocol import DataProto

    if not all(isinstance(result, DataProto) for result in results):
        return results
    joined = DataProto.concat(results)
    # A method may answer each row with several, as a rollout with samples per prompt does.
    if len(joined) % call.rows:
        raise ValueError(f"result: got {len(joined)} rows for {call.rows}; expected a multiple of them")
    return joined.unpad(call.padding * (len(joined) // call.rows))


MODES: dict[Dispatch, Mode] = {
    Dispatch.ONE_TO_ALL: Mode(_whole, _by_rank),
    Dispatch.ALL_TO_ALL: Mode(_as_given, _by_rank),
    Dispatch.DP_COMPUTE: Mode(_one_each, _by_rank),
    Dispatch.DP_COMPUTE_PROTO: Mode(_chunked, _joined),
    Dispatch.RANK_ZERO: Mode(_whole, _first),
}
