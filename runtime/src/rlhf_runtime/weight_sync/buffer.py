"""The shared-memory buffer that weights travel through on CPU."""

import os
from pathlib import Path

import torch

from rlhf_runtime.errors import WeightSyncError

FOLDER = Path("/dev/shm")


def create_buffer(path: Path, size: int) -> torch.Tensor:
    """A new shared-memory file of `size` bytes, mapped as uint8 [size].

    Raises:
        WeightSyncError: when there is not that much shared memory.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # Takes the pages now: a buffer that the folder cannot hold would end the process by SIGBUS when written to.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        path.unlink()
        free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
        raise WeightSyncError(
            f"weightSync.bucketMiB: got a buffer of {size} bytes; expected at most the {free} bytes that are free in "
            f"{path.parent} ({error.strerror}). Fix: lower `bucketMiB`, or raise the pool's `sharedMemory`"
        ) from error
    finally:
        os.close(descriptor)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def map_buffer(path: Path, size: int) -> torch.Tensor:
    """The buffer that another process of this machine made, as uint8 [size].

    Raises:
        WeightSyncError: when it is not there.
    """
    if not path.is_file() or path.stat().st_size != size:
        raise WeightSyncError(
            f"weightSync.method: got no buffer of {size} bytes at {path}; expected the policy's first rank on the same "
            "machine, sharing its /dev/shm. Fix: place rollout and policy in one group on one node"
        )
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
