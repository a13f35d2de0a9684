"""Moving buckets so that filling, moving and loading different ones overlap.

sender    wait for the slot ─ fill it ─ start its move ─ next bucket
receiver  start the next bucket's move ─ wait for this one ─ load it ─ next bucket
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import zip_longest

import torch

from rlhf_runtime.weight_sync.buckets import Bucket, BucketPlan, Views

LARGE_BYTES = 1 << 20
"""Mean size of a bucket's tensors from which all threads copy. On smaller ones they wait for each other, ten times as
long as one takes when an engine computes beside it."""
Wait = Callable[[], None]
"""Waits until a move that was started is done; raises what went wrong with it."""


def send_buckets(
    plan: BucketPlan,
    views: Sequence[Views],
    tensors: Iterable[tuple[str, torch.Tensor]],
    start: Callable[[Bucket], Wait],
) -> None:
    """Fill buckets and move them, each while the next is filled. A third is not begun before the first has moved.

    Args:
        plan: The model's buckets.
        views: Its tensors in the slots, a bucket after the other.
        tensors: The model's tensors, as the plan has them.
        start: Starts the move of a filled bucket.
    """
    on_way: deque[tuple[int, Wait]] = deque()
    stream = iter(tensors)
    for bucket in plan.buckets:
        while len(on_way) > 1 or any(slot == bucket.slot for slot, _ in on_way):
            on_way.popleft()[1]()
        with _one_thread() if bucket.used < len(bucket.specs) * LARGE_BYTES else nullcontext():
            _fill(views[bucket.index], stream)
        on_way.append((bucket.slot, start(bucket)))
    for _, wait in on_way:
        wait()


def _fill(views: Views, stream: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Copy a bucket's tensors into its slot, in one call: with many small ones Python takes as long as the bytes."""
    tensors = []
    for (expected, place), (name, tensor) in zip(views, stream, strict=False):
        if name != expected or tensor.shape != place.shape or tensor.dtype != place.dtype:
            raise RuntimeError(f"got tensor {name} {list(tensor.shape)} {tensor.dtype} in the place of {expected}")
        tensors.append(tensor)
    torch._foreach_copy_([place for _, place in views], tensors)


@contextmanager
def _one_thread() -> Iterator[None]:
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
