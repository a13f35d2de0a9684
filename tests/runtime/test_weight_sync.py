"""The parts of a weight sync that need no vLLM: checksums, comparison, the buffer, the order of steps, seeds."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_runtime.errors import RewardError, WeightSyncError
from rlhf_runtime.weight_sync import ReceivedWeights, SendReport, sync_weights
from rlhf_runtime.weight_sync.buffer import FOLDER, buffer_bytes, create_buffer, map_buffer
from rlhf_runtime.weight_sync.verify import BLOCK, checksum, verify
from rlhf_runtime.workers.rollout import sample_seed

SIZES = st.sampled_from([1, 2, 3, 5, 63, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64])


def random_bytes(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


@settings(deadline=None, max_examples=60)
@given(SIZES, DTYPES, st.integers(0, 2**32), st.data())
def test_checksum_sees_one_flipped_bit(size: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    tensor = random_bytes(size, dtype, seed)
    changed = tensor.clone()
    byte = data.draw(st.integers(0, size * dtype.itemsize - 1))
    changed.view(torch.uint8)[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(changed) != checksum(tensor)
    assert checksum(tensor.clone()) == checksum(tensor)


@settings(deadline=None, max_examples=60)
@given(SIZES, st.integers(0, 2**32), st.data())
def test_checksum_sees_two_swapped_words(size: int, seed: int, data: st.DataObject) -> None:
    tensor = random_bytes(size, torch.float32, seed)
    first, second = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[first], swapped[second] = tensor[second], tensor[first]
    same = torch.equal(swapped.view(torch.int32), tensor.view(torch.int32))
    assert (checksum(swapped) == checksum(tensor)) == same


def test_checksum_sees_a_sign_swap_and_moved_blocks() -> None:
    signs = torch.ones(2 * BLOCK)
    signs[5] = -1
    elsewhere = torch.ones(2 * BLOCK)
    elsewhere[6] = -1
    assert checksum(signs) != checksum(elsewhere)
    tensor = random_bytes(2 * BLOCK, torch.float32, 0)
    assert checksum(tensor.roll(BLOCK)) != checksum(tensor)


def test_checksum_means_dtype_shape_and_values_but_not_layout() -> None:
    tensor = random_bytes(24, torch.float32, 1).view(4, 6)
    assert checksum(tensor) != checksum(tensor.view(6, 4))
    assert checksum(tensor) != checksum(tensor.view(torch.int32))
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous()) != checksum(tensor)
    padded = random_bytes(7, torch.int8, 1)
    assert checksum(padded[1:4]) == checksum(padded[1:4].clone())
    assert checksum(torch.zeros(0)) != checksum(torch.zeros(1))


def test_a_checksum_is_the_one_that_its_formula_gives_in_plain_integers() -> None:
    """Sender and engine may be of two machines: the number must not hang on the device or the release of torch."""
    assert checksum(torch.arange(40000, dtype=torch.int32)) == 13165929014131468811


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


@given(st.lists(st.integers(0, 10_000), min_size=1), st.integers(1, 20_000))
def test_a_buffer_holds_a_bucket_the_largest_tensor_and_no_more_than_the_model(sizes: list[int], bucket: int) -> None:
    size = buffer_bytes(sizes, bucket)
    assert size >= max(sizes)
    assert size >= min(bucket, sum(sizes))
    assert size <= max(bucket, max(sizes) + 64)
    assert size <= sum(sizes) + 64 * len(sizes)


@pytest.fixture
def path() -> Path:
    return FOLDER / f"rlhf-test-{uuid.uuid4().hex}"


def test_both_ends_share_a_buffer_whose_name_is_gone(path: Path) -> None:
    ours = create_buffer(path, 4096)
    theirs = map_buffer(path, 4096)
    path.unlink()
    ours[17] = 5
    assert theirs[17] == 5
    assert not path.exists()


def test_too_little_shared_memory_is_told_and_leaves_nothing(path: Path) -> None:
    free = os.statvfs(FOLDER)
    too_much = free.f_blocks * free.f_frsize * 4
    with pytest.raises(WeightSyncError, match=rf"weightSync.bucketMiB: got a buffer of {too_much} bytes; .*bucketMiB"):
        create_buffer(path, too_much)
    assert not path.exists()


def test_an_engine_on_another_machine_finds_no_buffer_and_makes_none(path: Path) -> None:
    with pytest.raises(WeightSyncError, match=r"got no buffer .* Fix: place rollout and policy in one group"):
        map_buffer(path, 4096)
    assert not path.exists()


class FakeGroups:
    """A policy and two engines that write down what they are asked."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.record = ReceivedWeights(SENT, PARAMETERS, PARAMETERS)

    def __getattr__(self, step: str) -> Callable[..., list]:
        answers = {"send_weights": [SendReport(SENT, 10)], "received_weights": [[self.record], [self.record]]}

        def call(*_: object) -> list:
            self.steps.append(step)
            if step in self.fail:
                raise self.fail[step]
            return answers.get(step, [None, None])

        return call


def test_a_sync_is_its_steps_in_order() -> None:
    groups = FakeGroups()
    report = sync_weights(groups, groups, version=7)
    assert groups.steps == ["pause", "send_weights", "publish_weights", "received_weights", "resume"]
    assert (report.version, report.bytes) == (7, 10)
    assert report.seconds >= 0


@pytest.mark.parametrize("step", ["pause", "send_weights", "publish_weights", "received_weights"])
def test_engines_stay_paused_after_a_failed_step(step: str) -> None:
    groups = FakeGroups()
    groups.fail[step] = RuntimeError("out of memory")
    with pytest.raises(WeightSyncError, match=r"weightSync: got RuntimeError \(out of memory\); .*version 7"):
        sync_weights(groups, groups, version=7)
    assert groups.steps[-1] == step
    assert "resume" not in groups.steps


def test_engines_stay_paused_when_weights_differ_and_the_engine_is_named() -> None:
    groups = FakeGroups()
    groups.record = received(norm=5)
    with pytest.raises(WeightSyncError, match=r"norm: .* at engine 0, rank 0"):
        sync_weights(groups, groups, version=7)
    assert "resume" not in groups.steps


def test_an_error_that_is_already_told_is_not_told_again() -> None:
    groups = FakeGroups()
    groups.fail["send_weights"] = RewardError("as it is")
    with pytest.raises(RewardError, match=r"^as it is$"):
        sync_weights(groups, groups, version=7)


def test_sample_seeds_differ_and_repeat() -> None:
    seeds = {
        sample_seed(seed, version, index) for seed in range(3) for version in range(3) for index in (*range(40), 111)
    }
    assert len(seeds) == 3 * 3 * 41
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
