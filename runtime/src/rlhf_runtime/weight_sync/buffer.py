"""The shared-memory buffer that weights travel through on CPU.

It has no name in any folder, so that nothing stays behind whatever ends the processes: the memory lives as long as one
of them maps it. Other processes find it among the open files of the one that made it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlhf_runtime.errors import WeightSyncError

FOLDER = Path("/dev/shm")


@contextmanager
def create_buffer(size: int) -> Iterator[tuple[torch.Tensor, Path]]:
    """New shared memory, mapped as uint8 [size], and the path where others find it until the block ends.

    Raises:
        WeightSyncError: when there is not that much shared memory.
    """
    descriptor = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        _take_pages(descriptor, size)
        path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        yield torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8), path
    finally:
        os.close(descriptor)


def _take_pages(descriptor: int, size: int) -> None:
    """Take memory now: a buffer that the folder cannot hold would end the process by SIGBUS when written to."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.ftruncate(descriptor, 0)
        free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
        raise WeightSyncError(
            f"weightSync.bucketMiB: got a buffer of {size} bytes; expected at most the {free} bytes that are free in "
            f"{FOLDER} ({error.strerror}). Fix: lower `bucketMiB`, or raise the pool's `sharedMemory`"
        ) from error


def map_buffer(path: Path, size: int) -> torch.Tensor:
    """The buffer that another process of this machine made, as uint8 [size].

    Raises:
        WeightSyncError: when it is not there.
    """
    try:
        there = path.stat().st_size
    except OSError:
        there = None
    if there != size:
        raise WeightSyncError(
            f"weightSync.method: got no buffer of {size} bytes at {path}; expected the policy's first rank on the same "
            "machine and, in containers, in the same one. Fix: place rollout and policy in one group on one node"
        )
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
