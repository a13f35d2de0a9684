"""The parts of a weight sync that need no vLLM: checksums, comparison, the order of steps, seeds."""

import zlib
from collections.abc import Callable

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.errors import ConnectionLostError, InfrastructureError, RewardError, WeightSyncError
from rlhf_runtime.weight_sync import ReceivedWeights, SendReport, sync_weights
from rlhf_runtime.weight_sync.dtypes import ENGINE_DTYPES, wire_dtype
from rlhf_runtime.weight_sync.verify import BLOCK, block_checksum, checksum, verify
from rlhf_runtime.workers.rollout import sample_seed

SIZES = st.sampled_from([1, 2, 3, 5, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
Checksum = Callable[[torch.Tensor], int]
KINDS = pytest.mark.parametrize("take", [checksum, block_checksum])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64])


def random_bytes(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


@KINDS
@settings(deadline=None, max_examples=60)
@given(SIZES, DTYPES, st.integers(0, 2**32), st.data())
def test_a_checksum_sees_one_flipped_bit(
    take: Checksum, size: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    tensor = random_bytes(size, dtype, seed)
    changed = tensor.clone()
    byte = data.draw(st.integers(0, size * dtype.itemsize - 1))
    changed.view(torch.uint8)[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert take(changed) != take(tensor)
    assert take(tensor.clone()) == take(tensor)


@KINDS
@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(0, 2**32), st.data())
def test_a_checksum_sees_two_swapped_words(take: Checksum, size: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bytes(size, torch.float32, seed)
    first, second = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    same = torch.equal(swapped.view(torch.int32), tensor.view(torch.int32))
    assert (take(swapped) == take(tensor)) == same


@KINDS
def test_a_checksum_sees_a_sign_swap_and_moved_blocks(take: Checksum) -> None:
    signs = torch.ones(2 * BLOCK)
    signs[5] = -1
    elsewhere = torch.ones(2 * BLOCK)
    elsewhere[6] = -1
    assert take(signs) != take(elsewhere)
    tensor = random_bytes(2 * BLOCK, torch.float32, 0)
    assert take(tensor.roll(BLOCK)) != take(tensor)


@KINDS
def test_a_checksum_means_dtype_shape_and_values_but_not_layout(take: Checksum) -> None:
    tensor = random_bytes(24, torch.float32, 1).view(4, 6)
    assert take(tensor) != take(tensor.view(6, 4))
    assert take(tensor) != take(tensor.view(torch.int32))
    assert take(tensor.t()) == take(tensor.t().contiguous()) != take(tensor)
    padded = random_bytes(7, torch.int8, 1)
    assert take(padded[1:4]) == take(padded[1:4].clone())
    assert take(torch.zeros(0)) != take(torch.zeros(1))


def test_checksums_are_the_ones_that_their_formulas_give() -> None:
    """Sender and engine may be of two machines: the number must not hang on the release of torch."""
    data = torch.arange(40000, dtype=torch.int32)
    assert block_checksum(data) == 13165929014131468811
    assert checksum(data) == xxhash.xxh3_64_intdigest(data.numpy().tobytes(), zlib.crc32(b"torch.int32[40000]"))


SENT = {"embed": 1, "layer.q": 2, "layer.k": 3, "norm": 4}
PARAMETERS = frozenset({"embed", "layer.qk", "norm"})


def received(**changes: int | None) -> ReceivedWeights:
    checksums = {name: changes.get(name.replace(".", "_"), value) for name, value in SENT.items()}
    checksums |= {name: value for name, value in changes.items() if name not in checksums and "_" not in name}
    return ReceivedWeights({n: v for n, v in checksums.items() if v is not None}, PARAMETERS, PARAMETERS)


def test_equal_sides_pass() -> None:
    verify(SENT, received(), "engine 0")


@pytest.mark.parametrize(
    ("record", "name"),
    [
        (received(layer_q=9, norm=9), "layer.q"),
        (received(layer_k=None, norm=None), "layer.k"),
        (received(extra=1), "extra"),
        (ReceivedWeights({}, PARAMETERS, frozenset()), "embed"),
        (ReceivedWeights(SENT, PARAMETERS, PARAMETERS - {"layer.qk"}), "layer.qk"),
    ],
    ids=["changed", "missing", "unasked", "nothing", "left out"],
)
def test_the_first_tensor_at_fault_is_named(record: ReceivedWeights, name: str) -> None:
    with pytest.raises(WeightSyncError, match=rf"weightSync: {name}: got .* at engine 3.*; expected .* Fix: "):
        verify(SENT, record, "engine 3")


def test_a_sync_of_nothing_at_all_fails() -> None:
    with pytest.raises(WeightSyncError, match="every parameter"):
        verify({}, ReceivedWeights({}, frozenset(), frozenset()), "engine 0")


def test_without_checksums_names_and_parameters_are_still_compared() -> None:
    sent = dict.fromkeys(SENT)
    verify(sent, ReceivedWeights(sent, PARAMETERS, PARAMETERS), "engine 0")
    with pytest.raises(WeightSyncError, match=r"layer\.k: got nothing"):
        verify(sent, ReceivedWeights({"embed": None, "layer.q": None}, PARAMETERS, PARAMETERS), "engine 0")
    with pytest.raises(WeightSyncError, match="norm: got no new value"):
        verify(sent, ReceivedWeights(sent, PARAMETERS, PARAMETERS - {"norm"}), "engine 0")


class FakeGroups:
    """A policy and two engines that write down what they are asked, and fail at it a number of times."""

    def __init__(self, **failures: list[Exception]) -> None:
        self.steps: list[str] = []
        self.failures = failures
        self.records = [ReceivedWeights(SENT, PARAMETERS, PARAMETERS)]

    def __getattr__(self, step: str) -> Callable[..., list]:
        def call(*arguments: object) -> list:
            self.steps.append("send afresh" if (step, arguments) == ("send_weights", (True,)) else step)
            if self.failures.get(step):
                raise self.failures[step].pop(0)
            if step == "received_weights":
                record = self.records.pop(0) if len(self.records) > 1 else self.records[0]
                return [[ReceivedWeights(SENT, PARAMETERS, PARAMETERS)], [record]]
            return [SendReport(SENT, 10)] if step == "send_weights" else [None, None]

        return call


ONCE = ["pause", "send_weights", "received_weights", "publish_weights", "resume"]
AGAIN = ["send afresh", "received_weights", "publish_weights", "resume"]


def test_a_sync_is_its_steps_in_order() -> None:
    groups = FakeGroups()
    report = sync_weights(groups, groups, version=7)
    assert groups.steps == ONCE
    assert (report.version, report.bytes) == (7, 10)
    assert report.seconds >= 0


def test_a_sync_whose_connection_broke_is_repeated_in_full_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    groups = FakeGroups(send_weights=[ConnectionLostError("gone")])
    sync_weights(groups, groups, version=7)
    assert groups.steps == ["pause", "send_weights", *AGAIN]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "Weight sync to version 7 failed and is repeated in full: gone")
    ]


def test_a_sync_whose_weights_differ_once_is_repeated() -> None:
    groups = FakeGroups()
    groups.records.insert(0, received(norm=5))
    sync_weights(groups, groups, version=7)
    assert groups.steps == ["pause", "send_weights", "received_weights", *AGAIN]


def test_a_sync_that_fails_again_fails_the_step() -> None:
    groups = FakeGroups(send_weights=[WeightSyncError("late"), WeightSyncError("late again"), WeightSyncError("more")])
    with pytest.raises(WeightSyncError, match=r"^late again$"):
        sync_weights(groups, groups, version=7)
    assert groups.steps == ["pause", "send_weights", "send afresh"]


@pytest.mark.parametrize("step", ["pause", "send_weights", "received_weights", "publish_weights"])
def test_engines_stay_paused_after_a_failed_step(step: str) -> None:
    groups = FakeGroups(**{step: [RuntimeError("out of memory")]})
    with pytest.raises(WeightSyncError, match=r"weightSync: got RuntimeError \(out of memory\); .*version 7"):
        sync_weights(groups, groups, version=7)
    assert groups.steps == ONCE[: ONCE.index(step) + 1]


def test_weights_that_differ_are_never_published_and_the_engine_is_named() -> None:
    groups = FakeGroups()
    groups.records = [received(norm=5)]
    with pytest.raises(WeightSyncError, match=r"norm: .* at engine 1, rank 0"):
        sync_weights(groups, groups, version=7)
    assert not {"publish_weights", "resume"} & set(groups.steps)


@pytest.mark.parametrize("error", [RewardError("as it is"), InfrastructureError("as it is")])
def test_the_loss_of_a_worker_is_told_as_it_is_and_not_repeated(error: Exception) -> None:
    groups = FakeGroups(send_weights=[error])
    with pytest.raises(type(error), match=r"^as it is$"):
        sync_weights(groups, groups, version=7)
    assert groups.steps == ["pause", "send_weights"]


def test_weights_travel_as_the_engine_computes() -> None:
    assert [wire_dtype(torch.float32, ENGINE_DTYPES[transport]) for transport in ("ipc", "nccl")] == [
        torch.bfloat16
    ] * 2
    assert [wire_dtype(torch.float32, ENGINE_DTYPES[transport]) for transport in ("shm", "gloo")] == [torch.float32] * 2
    assert wire_dtype(torch.bfloat16, torch.bfloat16) == torch.bfloat16
    assert wire_dtype(torch.int8, torch.bfloat16) == torch.int8


def test_sample_seeds_differ_and_repeat() -> None:
    seeds = {
        sample_seed(seed, version, index) for seed in range(3) for version in range(3) for index in (*range(40), 111)
    }
    assert len(seeds) == 3 * 3 * 41
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
