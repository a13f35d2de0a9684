"""DataProto: the batch that flows between the driver and the workers.

Three parts share one object: tensor columns (dense [B, ...], or ragged as jagged nested tensors [B, R*]), columns of
Python objects [B], and facts about the batch as a whole. Rows keep their order through every method. What arrives
after serialisation equals what was sent, in dtype, offsets and order, and lies on the CPU; a chunk carries its own rows
alone, not the batch that it was cut from.

Tensors that arrive from Ray are read-only: they share the memory of its object store, where writing to one ends the
process. Clone a column before writing to it in place.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from rlhf_runtime.ragged import from_values, lengths, take

VALID = "valid"
"""Dense bool column [B] that is False on rows which only pad the batch to a multiple of the world size."""


@dataclass(eq=False)
class DataProto:
    """A batch of B rows."""

    batch: TensorDict
    """Tensor columns, dense [B, ...] or jagged [B, R*, ...]; batch size [B]."""
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    """Object arrays [B]."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Facts about the batch as a whole."""

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Sequence[Any] | np.ndarray] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """A batch from its columns.

        Args:
            tensors: Dense [B, ...] or jagged [B, R*, ...] columns.
            non_tensors: Columns of B Python objects.
            meta_info: Facts about the batch as a whole.

        Raises:
            ValueError: when there is no column or columns differ in length.
        """
        objects = {name: _object_array(values) for name, values in (non_tensors or {}).items()}
        sizes = {name: _rows(name, column) for name, column in {**tensors, **objects}.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"columns: got lengths {sizes}; expected at least one column, all of one length")
        rows = next(iter(sizes.values()))
        columns = {name: column.contiguous() for name, column in tensors.items()}
        return cls(TensorDict(columns, batch_size=[rows]), objects, dict(meta_info or {}))

    def __len__(self) -> int:
        return self.batch.batch_size[0]

    @property
    def columns(self) -> list[str]:
        """Names of all columns, tensors first."""
        return [*self.batch.keys(), *self.non_tensor_batch]

    def select(self, columns: Iterable[str]) -> Self:
        """The same rows with these columns alone.

        Raises:
            ValueError: when one is not there.
        """
        columns = list(columns)
        if missing := [name for name in columns if name not in self.columns]:
            raise ValueError(f"columns: got {missing}; expected some of {self.columns}")
        objects = {name: values for name, values in self.non_tensor_batch.items() if name in columns}
        return self._with(self.batch.select(*(name for name in columns if name not in objects)), objects)

    def select_rows(self, rows: torch.Tensor) -> Self:
        """The rows that an int64 index [N] names, in its order, or that a bool mask [B] keeps.

        Raises:
            ValueError: when an index is out of range or the mask has another length.
        """
        if rows.dtype == torch.bool and len(rows) == len(self):
            rows = rows.nonzero().squeeze(1)
        elif rows.dtype == torch.bool or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(self)):
            raise ValueError(f"rows: got {rows}; expected indices below {len(self)} or a mask of that length")
        return self._rows(rows)

    def chunk(self, chunks: int) -> list[Self]:
        """Consecutive parts whose sizes differ by at most one, the longer ones first; they share this batch's memory.

        Of fewer rows than chunks the last chunks have none.

        Raises:
            ValueError: when there is to be no chunk.
        """
        sizes = chunk_sizes(len(self), chunks)
        ends = np.cumsum(sizes)
        return [self._rows(slice(int(end) - size, int(end))) for end, size in zip(ends, sizes, strict=True)]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rows of the parts, in order.

        Raises:
            ValueError: when there is no part, or parts differ in columns or meta_info.
        """
        if not parts:
            raise ValueError("parts: got none; expected at least one")
        first = parts[0]
        for index, part in enumerate(parts):
            if set(part.columns) != set(first.columns):
                raise ValueError(f"parts[{index}]: got columns {part.columns}; expected {first.columns}")
            if not _same(part.meta_info, first.meta_info):
                raise ValueError(f"parts[{index}]: got meta_info {part.meta_info}; expected {first.meta_info}")
        columns = {name: _concat_column(name, [part.batch[name] for part in parts]) for name, _ in first.batch.items()}
        objects = {name: np.concatenate([p.non_tensor_batch[name] for p in parts]) for name in first.non_tensor_batch}
        batch = TensorDict(columns, batch_size=[sum(map(len, parts))])
        return cls(batch, objects, dict(first.meta_info))

    def union(self, other: Self) -> Self:
        """The columns and meta_info of both.

        Raises:
            ValueError: when lengths differ, or a column or fact that both have differs.
        """
        if len(self) != len(other):
            raise ValueError(f"union: got {len(other)} rows; expected {len(self)}")
        mine, others = _all_columns(self), _all_columns(other)
        for name in mine.keys() & others.keys():
            if not _same(mine[name], others[name]):
                raise ValueError(f"union: got another content of column `{name}`; expected an equal one, or a new name")
        for name in self.meta_info.keys() & other.meta_info.keys():
            if not _same(self.meta_info[name], other.meta_info[name]):
                got = f"{other.meta_info[name]!r}; expected {self.meta_info[name]!r}"
                raise ValueError(f"union: got meta_info `{name}` {got}")
        batch = TensorDict({**other.batch, **self.batch}, batch_size=[len(self)])
        objects = {**other.non_tensor_batch, **self.non_tensor_batch}
        return type(self)(batch, objects, {**other.meta_info, **self.meta_info})

    def pad_to_multiple(self, multiple: int) -> tuple[Self, int]:
        """The batch with rows repeated until its length is a multiple, and how many were added.

        The result always has the bool column `valid` [B], False on the added rows.

        Raises:
            ValueError: when there is no row to repeat.
        """
        if not len(self):
            raise ValueError("batch: got 0 rows; expected at least 1")
        added = -len(self) % multiple
        padded = self._rows(torch.arange(len(self) + added) % len(self) if added else slice(None))
        valid = padded.batch[VALID].clone() if VALID in padded.columns else torch.ones(len(padded), dtype=torch.bool)
        valid[len(self) :] = False
        padded.batch[VALID] = valid
        return padded, added

    def unpad(self, count: int) -> Self:
        """The batch without its last `count` rows."""
        return self._rows(slice(0, len(self) - count)) if count else self

    def _rows(self, rows: torch.Tensor | slice) -> Self:
        keys = rows if isinstance(rows, slice) else rows.cpu().numpy()
        columns = {
            name: take(column, rows) if column.is_nested else column[rows] for name, column in self.batch.items()
        }
        count = len(range(*rows.indices(len(self)))) if isinstance(rows, slice) else len(rows)
        objects = {name: values[keys] for name, values in self.non_tensor_batch.items()}
        return self._with(TensorDict(columns, batch_size=[count]), objects)

    def _with(self, batch: TensorDict, objects: dict[str, np.ndarray]) -> Self:
        return type(self)(batch, objects, dict(self.meta_info))

    def __reduce__(self) -> tuple[Callable[..., "DataProto"], tuple[Any, ...]]:
        """Columns as bytes: exact for every dtype, free of storage that other rows share, and out of band for Ray."""
        columns = {name: _pack(column) for name, column in self.batch.items()}
        return _unpack_proto, (type(self), len(self), columns, self.non_tensor_batch, self.meta_info)


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Rows of each chunk that `DataProto.chunk` cuts.

    Raises:
        ValueError: when there is to be no chunk.
    """
    if chunks < 1:
        raise ValueError(f"chunks: got {chunks}; expected at least 1")
    return [rows // chunks + (index < rows % chunks) for index in range(chunks)]


@dataclass(frozen=True)
class _Packed:
    """A tensor on its way: bytes, and what they mean."""

    data: np.ndarray
    dtype: torch.dtype
    shape: torch.Size
    lengths: np.ndarray | None
    """Entries a row of a jagged column, [B]; none for a dense one."""


def _pack(column: torch.Tensor) -> _Packed:
    values = column.values() if column.is_nested else column
    values = values.detach().cpu().contiguous()
    counts = lengths(column).cpu().numpy() if column.is_nested else None
    return _Packed(values.reshape(-1).view(torch.uint8).numpy(), values.dtype, values.shape, counts)


def _unpack(packed: _Packed) -> torch.Tensor:
    values = torch.from_numpy(packed.data).view(packed.dtype).view(packed.shape)
    return values if packed.lengths is None else from_values(values, torch.from_numpy(packed.lengths))


def _unpack_proto(
    cls: type[DataProto],
    rows: int,
    columns: dict[str, _Packed],
    objects: dict[str, np.ndarray],
    meta_info: dict[str, Any],
) -> DataProto:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # as documented above
        tensors = {name: _unpack(packed) for name, packed in columns.items()}
    return cls(TensorDict(tensors, batch_size=[rows]), objects, meta_info)


def _rows(name: str, column: torch.Tensor | np.ndarray) -> int:
    if not len(column.shape):
        raise ValueError(f"{name}: got a scalar; expected a column [B, ...]")
    return int(column.shape[0])


def _object_array(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    # Filled one by one: numpy would turn equally long lists into a matrix.
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _all_columns(data: DataProto) -> dict[str, Any]:
    return {**data.batch, **data.non_tensor_batch}


def _concat_column(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    kinds = {(part.dtype, part.is_nested) for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{name}: got parts of kinds {kinds}; expected one dtype, all dense or all ragged")
    if not parts[0].is_nested:
        return torch.cat(parts)
    return from_values(torch.cat([part.values() for part in parts]), torch.cat([lengths(part) for part in parts]))


def _same(left: Any, right: Any) -> bool:
    """Equality that looks into tensors, arrays and dicts, and under which NaN equals itself."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and _same(left.tolist(), right.tolist())
    if isinstance(left, torch.Tensor):
        return left.is_nested == right.is_nested and _same(vars(_pack(left)), vars(_pack(right)))
    if isinstance(left, float) and left != left:
        return bool(right != right)
    return bool(left == right)
