import pickle
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import from_padded, from_values, lengths, ragged, to_padded

ROW_LENGTHS = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, 5), min_size=1, max_size=3 * ranks))
)


def batch_of(row_lengths: list[int]) -> DataProto:
    """Row i holds i in every column, `row_lengths[i]` times in the ragged one."""
    rows = len(row_lengths)
    return DataProto.from_dict(
        {
            "index": torch.arange(rows),
            "scores": torch.arange(rows * 2, dtype=torch.bfloat16).reshape(rows, 2),
            "tokens": ragged([torch.full((length,), row) for row, length in enumerate(row_lengths)]),
        },
        {"text": [[row] for row in range(rows)]},
        {"step": 3},
    )


def rows_of(data: DataProto) -> list[tuple[int, list[int], list[int]]]:
    return [
        (int(index), tokens.tolist(), text)
        for index, tokens, text in zip(
            data.batch["index"], data.batch["tokens"].unbind(), data.non_tensor_batch["text"], strict=True
        )
    ]


@settings(deadline=None, max_examples=60)
@given(ROW_LENGTHS)
def test_padding_chunking_and_joining_keep_every_row_in_order(case: tuple[int, list[int]]) -> None:
    ranks, row_lengths = case
    data = batch_of(row_lengths)

    padded, added = data.pad_to_multiple(ranks)
    chunks = padded.chunk(ranks)
    joined = DataProto.concat([pickle.loads(pickle.dumps(chunk)) for chunk in chunks])

    assert len(padded) % ranks == 0
    assert 0 <= added < ranks
    assert padded.batch["valid"].tolist() == [True] * len(data) + [False] * added
    assert {len(chunk) for chunk in chunks} == {len(padded) // ranks}
    assert rows_of(joined.unpad(added)) == rows_of(data)
    assert joined.meta_info == {"step": 3}
    assert rows_of(joined)[: len(data)] == rows_of(data)
    assert set(map(str, rows_of(joined))) == set(map(str, rows_of(data)))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.data())
def test_chunks_differ_by_one_row_at_most(row_lengths: list[int], draw: st.DataObject) -> None:
    data = batch_of(row_lengths)
    chunks = data.chunk(draw.draw(st.integers(1, len(data) + 2)))
    sizes = [len(chunk) for chunk in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows_of(data)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_rows_are_selected_by_index_and_by_mask(row_lengths: list[int], draw: st.DataObject) -> None:
    data, rows = batch_of(row_lengths), rows_of(batch_of(row_lengths))
    index = draw.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    mask = draw.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert rows_of(data.select_rows(torch.tensor(index, dtype=torch.int64))) == [rows[i] for i in index]
    assert rows_of(data.select_rows(torch.tensor(mask))) == [row for row, keep in zip(rows, mask, strict=True) if keep]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.sampled_from([(), (3,)]))
def test_ragged_survives_padding_and_back(row_lengths: list[int], trailing: tuple[int, ...]) -> None:
    column = ragged([torch.randn(length, *trailing) for length in row_lengths])
    padded = to_padded(column, -1.0)
    again = from_padded(padded, lengths(column))
    assert padded.shape == (len(row_lengths), max(row_lengths), *trailing)
    assert lengths(column).tolist() == row_lengths
    assert torch.equal(again.values(), column.values())
    assert torch.equal(again.offsets(), column.offsets())
    for row, length in enumerate(row_lengths):
        assert (padded[row, length:] == -1.0).all()


def test_padding_a_column_passes_gradients_to_its_values() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (to_padded(from_values(values * 2, torch.tensor([1, 0, 2])), 0.0) ** 2).sum().backward()
    assert values.grad.tolist() == [8.0, 16.0, 24.0]


def test_pickling_keeps_dtype_shape_and_bits_of_every_column() -> None:
    data = DataProto.from_dict(
        {
            "nan": torch.tensor([[float("nan"), -0.0]], dtype=torch.float16),
            "flag": torch.tensor([True]),
            "empty": torch.zeros(1, 0, dtype=torch.int32),
            "none": ragged([torch.zeros(0, dtype=torch.bfloat16)]),
        },
        {"columns": [{"answer": np.float32(1.5)}]},
    )
    arrived = pickle.loads(pickle.dumps(data))
    for name, column in data.batch.items():
        assert arrived.batch[name].dtype == column.dtype
    assert arrived.batch["empty"].shape == (1, 0)
    assert arrived.batch["nan"].view(torch.int16).tolist() == data.batch["nan"].view(torch.int16).tolist()
    assert arrived.batch["none"].offsets().tolist() == [0, 0]
    assert arrived.union(data).columns == arrived.columns


def test_a_chunk_travels_without_the_rest_of_its_batch() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1000, 1000)})
    assert len(pickle.dumps(data.chunk(1000)[7])) < 20_000


def in_buffers(data: DataProto) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A batch as Ray takes it: the large parts apart, as they lie in memory."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(data, protocol=5, buffer_callback=buffers.append), buffers


def lies_in(column: torch.Tensor, memory: np.ndarray) -> bool:
    values = column.values() if column.is_nested else column
    start = memory.__array_interface__["data"][0]
    return start <= values.data_ptr() and values.data_ptr() + values.nbytes <= start + memory.nbytes


def test_a_chunk_is_sent_and_received_without_copies() -> None:
    data = batch_of([1, 5, 3, 2]).select(["scores", "tokens"])
    chunk = data.chunk(2)[1]
    for name in ("scores", "tokens"):
        whole = data.batch[name].values() if name == "tokens" else data.batch[name]
        assert lies_in(chunk.batch[name], whole.view(torch.uint8).numpy())

    payload, buffers = in_buffers(chunk)
    sent = [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]
    assert all(any(lies_in(column, memory) for memory in sent) for column in chunk.batch.values())

    stored = [memory.copy() for memory in sent]
    for memory in stored:
        memory.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = pickle.loads(payload, buffers=stored)
    assert all(any(lies_in(column, memory) for memory in stored) for column in arrived.batch.values())
    assert [tokens.tolist() for tokens in arrived.batch["tokens"].unbind()] == [[2] * 3, [3] * 2]


def test_a_batch_without_rows_goes_everywhere() -> None:
    data = batch_of([2, 1])
    full, empty = data.chunk(3)[0], pickle.loads(pickle.dumps(data.chunk(3)[2]))
    assert len(empty) == 0
    assert empty.columns == data.columns
    assert [column.dtype for column in empty.batch.values()] == [column.dtype for column in data.batch.values()]
    assert rows_of(empty) == rows_of(empty.select_rows(torch.zeros(0, dtype=torch.int64))) == []
    assert rows_of(DataProto.concat([empty, full, empty])) == rows_of(full)
    assert len(DataProto.concat([empty, empty])) == 0
    assert empty.union(empty.select(["index"])).columns == data.columns
    assert [len(part) for part in empty.chunk(2)] == [0, 0]
    assert to_padded(empty.batch["tokens"], 0).shape == (0, 0)
    assert empty.unpad(0) is empty


def test_padding_keeps_what_was_invalid_before() -> None:
    data = DataProto.from_dict({"valid": torch.tensor([True, False, True])})
    assert data.pad_to_multiple(2)[0].batch["valid"].tolist() == [True, False, True, False]
    assert data.batch["valid"].tolist() == [True, False, True]


def test_lists_of_equal_length_stay_objects() -> None:
    data = DataProto.from_dict({}, {"ids": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["ids"].shape == (2,)
    assert data.select_rows(torch.tensor([1])).non_tensor_batch["ids"].tolist() == [[3, 4]]


def test_select_keeps_the_named_columns() -> None:
    assert batch_of([1, 0]).select(["text", "index"]).columns == ["index", "text"]


def test_union_adds_columns_and_accepts_equal_ones() -> None:
    data = batch_of([1, 0, 2])
    joined = data.select(["tokens", "text"]).union(data.select(["index", "tokens"]))
    assert sorted(joined.columns) == ["index", "text", "tokens"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DataProto.from_dict({}), "at least one column"),
        (lambda: DataProto.from_dict({"x": torch.zeros(2)}, {"y": [1]}), "all of one length"),
        (lambda: DataProto.from_dict({"x": torch.tensor(1.0)}), "x: got a scalar"),
        (lambda: batch_of([1]).select(["nothing"]), "nothing"),
        (lambda: batch_of([1]).select_rows(torch.tensor([1])), "indices below 1"),
        (lambda: batch_of([1]).select_rows(torch.tensor([True, False])), "a mask of that length"),
        (lambda: batch_of([1]).chunk(0), "got 0; expected at least 1"),
        (lambda: DataProto.concat([]), "at least one"),
        (lambda: DataProto.concat([batch_of([1]), batch_of([1]).select(["index"])]), "parts.1.: got columns"),
        (lambda: batch_of([1]).union(batch_of([1, 1])), "got 2 rows; expected 1"),
        (lambda: batch_of([1]).union(batch_of([2])), "column `tokens`"),
        (lambda: batch_of([1]).select_rows(torch.tensor([], dtype=torch.int64)).pad_to_multiple(2), "got 0 rows"),
        (lambda: from_values(torch.zeros(3), torch.tensor([1, 1])), "expected .* adding up to 3"),
        (lambda: from_padded(torch.zeros(1, 2), torch.tensor([3])), "each at most 2"),
        (lambda: ragged([]), "at least one"),
        (lambda: ragged([torch.zeros(1), torch.zeros(1, dtype=torch.int64)]), "one dtype"),
    ],
)
def test_misuse_is_refused_in_words(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_concat_refuses_facts_that_differ() -> None:
    other = DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"step": 2})
    with pytest.raises(ValueError, match="meta_info"):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"step": 1}), other])
