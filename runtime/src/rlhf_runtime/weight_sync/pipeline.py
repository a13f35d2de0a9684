"""Moving buckets so that filling, moving and loading different ones overlap.

sender    wait for the slot ─ fill it ─ start its move ─ next bucket
receiver  start the next bucket's move ─ wait for this one ─ load it ─ next bucket
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch

from rlhf_runtime.weight_sync.buckets import Bucket, BucketPlan

Wait = Callable[[], None]
"""Waits until a move that was started is done; raises what went wrong with it."""


def send_buckets(
    plan: BucketPlan,
    slots: Sequence[torch.Tensor],
    tensors: Iterable[tuple[str, torch.Tensor]],
    start: Callable[[Bucket], Wait],
) -> None:
    """Fill buckets and move them, each while the next is filled.

    Args:
        plan: The model's buckets.
        slots: Bytes of each slot.
        tensors: The model's tensors, as the plan has them.
        start: Starts the move of a filled bucket.
    """
    on_way: dict[int, Wait] = {}
    stream = iter(tensors)
    with _one_thread():
        for bucket in plan.buckets:
            if wait := on_way.pop(bucket.slot, None):
                wait()
            _fill(bucket, slots[bucket.slot], stream)
            on_way[bucket.slot] = start(bucket)
        for wait in on_way.values():
            wait()


def _fill(bucket: Bucket, slot: torch.Tensor, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy a bucket's tensors into its slot, uint8."""
    for expected, place in bucket.views(slot):
        name, tensor = next(stream)
        if name != expected or tensor.shape != place.shape or tensor.dtype != place.dtype:
            raise RuntimeError(f"got tensor {name} {list(tensor.shape)} {tensor.dtype} in the place of {expected}")
        place.copy_(tensor)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copy with one thread, which is as fast as memory; more would wait for each other when the rest is busy moving."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def receive_buckets(plan: BucketPlan, start: Callable[[Bucket], Wait], load: Callable[[Bucket], None]) -> None:
    """Load buckets, each while the next is on its way.

    Args:
        plan: The model's buckets.
        start: Starts to receive a bucket into its slot.
        load: Loads a bucket; its slot is overwritten afterwards.
    """
    ahead: Wait | None = None
    for bucket, following in zip_longest(plan.buckets, plan.buckets[1:]):
        wait = ahead or start(bucket)
        ahead = start(following) if following and following.slot != bucket.slot else None
        wait()
        load(bucket)
