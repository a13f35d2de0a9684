"""Moving buckets so that filling, moving and loading different ones overlap.

sender    wait for the slot ─ fill it ─ start its move ─ next bucket
receiver  start the next bucket's move ─ wait for this one ─ load it ─ next bucket
"""

from collections.abc import Callable, Iterable, Sequence
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
    for bucket in plan.buckets:
        if wait := on_way.pop(bucket.slot, None):
            wait()
        for expected, place in bucket.views(slots[bucket.slot]):
            name, tensor = next(stream)
            if name != expected or tensor.shape != place.shape or tensor.dtype != place.dtype:
                raise RuntimeError(f"got tensor {name} {list(tensor.shape)} {tensor.dtype} in the place of {expected}")
            place.copy_(tensor)
        on_way[bucket.slot] = start(bucket)
    for wait in on_way.values():
        wait()


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
