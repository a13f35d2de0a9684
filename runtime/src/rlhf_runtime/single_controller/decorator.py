"""How a call on a group becomes calls on its workers, and their results one result.

    @register marks a method -> mode.dispatch(arguments) -> one call a rank -> mode.collect(results)

A mode is a `Dispatch`, or a `Mode`: a pair of functions of one's own, such as one that balances rows over ranks by
their length. It stays on the driver, so it may hold what cannot be pickled.

Pure: nothing here knows of Ray, and torch is loaded with the first batch, so worker classes may import it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rlhf_runtime.protocol import DataProto

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
    DP_COMPUTE_SHARD = "dp_compute_shard"
    """As `DP_COMPUTE_PROTO` without padding: chunks differ by at most one row, the longer ones first. Of fewer rows
    than ranks the last ranks get none, and are called all the same."""
    RANK_ZERO = "rank_zero"
    """Arguments whole; the result of rank 0 alone."""


class Execute(Enum):
    """Which ranks run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


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
    ranks: Sequence[int] | None = None
    """Ranks that run; default all of them."""
    plan: Any = None
    """What `collect` has to know."""


@dataclass(frozen=True)
class Mode:
    """The two halves of a dispatch mode."""

    dispatch: Callable[[int, tuple[Any, ...], dict[str, Any]], Call]
    """(world size, args, kwargs) -> call. Each `PerRank` holds a value for every rank, of those that do not run too."""
    collect: Callable[[Call, list[Any]], Any]
    """(call without its arguments, results of the ranks that ran, in the order of the call) -> what the caller gets."""


@dataclass(frozen=True)
class Registration:
    """What `register` says of a method."""

    dispatch_mode: Dispatch | Mode
    execute_mode: Execute
    blocking: bool

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a class that travels by value leaves this behind, as only the driver reads it."""
        return type(None), ()


def register(
    dispatch_mode: Dispatch | Mode = Dispatch.ONE_TO_ALL,
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
    if execute_mode is Execute.RANK_ZERO and dispatch_mode not in _WHOLE:
        name = dispatch_mode.name if isinstance(dispatch_mode, Dispatch) else "a mode of one's own"
        raise ValueError(f"execute_mode: got RANK_ZERO with {name}; expected ALL, as other ranks have data")

    def mark(method: Method) -> Method:
        setattr(method, _REGISTRATION, Registration(dispatch_mode, execute_mode, blocking))
        return method

    return mark


def require_batch(args: tuple[Any, ...]) -> Any:
    """The first argument of a call, for a mode of one's own that spreads its rows.

    Raises:
        ValueError: when it is no `DataProto` with rows.
    """
    from rlhf_runtime.protocol import DataProto

    if not args or not isinstance(args[0], DataProto):
        got = type(args[0]).__name__ if args else "no argument by position"
        raise ValueError(f"argument 0: got {got}; expected a DataProto")
    if not len(args[0]):
        raise ValueError("argument 0: got a DataProto of 0 rows; expected at least 1")
    return args[0]


def registered_methods(cls: type) -> dict[str, Registration]:
    """The methods of a worker class that `register` marked, by name."""
    found = {name: getattr(getattr(cls, name), _REGISTRATION, None) for name in dir(cls)}
    return {name: registration for name, registration in found.items() if registration is not None}


def mode_of(dispatch_mode: Dispatch | Mode) -> Mode:
    """The functions of a dispatch mode."""
    return dispatch_mode if isinstance(dispatch_mode, Mode) else MODES[dispatch_mode]


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


@dataclass(frozen=True)
class _Rows:
    """How the rows of a call were cut."""

    sizes: list[int]
    """Rows of each rank."""
    padding: int
    """How many of them, at the end, are padding."""


def _cut(world_size: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, pad: bool) -> Call:
    from rlhf_runtime.protocol import DataProto, chunk_sizes

    lengths = {len(value) for value in (*args, *kwargs.values()) if isinstance(value, DataProto)}
    if len(lengths) != 1:
        got = f"DataProto of {sorted(lengths)} rows" if lengths else "no DataProto"
        raise ValueError(f"arguments: got {got}; expected at least one, all of one length")
    rows = lengths.pop()
    padding = -rows % world_size if pad else 0

    def cut(name: str, value: Any) -> Shared | PerRank:
        if isinstance(value, DataProto):
            return PerRank((value.pad_to_multiple(world_size)[0] if pad else value).chunk(world_size))
        return _checked(name, value, world_size)

    return replace(_map(cut, args, kwargs), plan=_Rows(chunk_sizes(rows + padding, world_size), padding))


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


def scatter(batch: "DataProto", rows: Sequence[Any], keep: int, others: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """A call in which each rank gets rows of its own of a batch, the other arguments whole, for `in_order` to collect.

    Args:
        batch: The batch.
        rows: Of each rank its rows, int64; a rank without any is not called.
        keep: How many of the batch's rows are wanted back; those after are padding.
        others: The other arguments.
        kwargs: Those by name.
    """
    busy = [rank for rank, own in enumerate(rows) if len(own)]
    chunks = PerRank([batch.select_rows(own) if len(own) else None for own in rows])
    shared = {name: Shared(value) for name, value in kwargs.items()}
    return Call((chunks, *map(Shared, others)), shared, ranks=busy, plan=order_of([rows[rank] for rank in busy], keep))


def order_of(rows: Sequence[Any], keep: int) -> Any:
    """Where each of a batch's first `keep` rows, [keep] int64, stands among those of all ranks one after the other."""
    import torch

    return torch.cat(list(rows)).argsort()[:keep]


def in_order(call: Call, results: list["DataProto"]) -> "DataProto":
    """The rows of a `scatter`ed batch's results in the order of that batch, without padding."""
    from rlhf_runtime.protocol import DataProto

    return DataProto.concat(results).select_rows(call.plan)


def by_rank(call: Call, results: list[Any]) -> list[Any]:
    """The results as they are, by rank."""
    return results


def _first(call: Call, results: list[Any]) -> Any:
    return results[0]


def _joined(call: Call, results: list[Any]) -> Any:
    from rlhf_runtime.protocol import DataProto

    if not all(isinstance(result, DataProto) for result in results):
        return results
    rows: _Rows = call.plan
    # A method may answer each row with several, as a rollout with samples per prompt does.
    each = sum(map(len, results)) // max(sum(rows.sizes), 1)
    if any(len(result) != each * size for result, size in zip(results, rows.sizes, strict=True)):
        sizes = [len(result) for result in results]
        raise ValueError(f"results: got {sizes} rows for {rows.sizes}; expected the same multiple on every rank")
    return DataProto.concat(results).unpad(rows.padding * each)


MODES: dict[Dispatch, Mode] = {
    Dispatch.ONE_TO_ALL: Mode(_whole, by_rank),
    Dispatch.ALL_TO_ALL: Mode(_as_given, by_rank),
    Dispatch.DP_COMPUTE: Mode(_one_each, by_rank),
    Dispatch.DP_COMPUTE_PROTO: Mode(partial(_cut, pad=True), _joined),
    Dispatch.DP_COMPUTE_SHARD: Mode(partial(_cut, pad=False), _joined),
    Dispatch.RANK_ZERO: Mode(_whole, _first),
}

_WHOLE = (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL, Dispatch.RANK_ZERO)
"""Modes that leave no rank's data behind when rank 0 runs alone."""
