"""The base of every worker: a plain class that knows its rank. What starts it as an actor is elsewhere.

A group becomes one in two steps, so that no port is chosen before it is bound: rank 0 opens a store, which binds a free
port and tells it; then every rank joins through that store.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from rlhf_runtime.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore

SPIN_COUNT = "2000"
"""How often GNU's OpenMP threads look for work before they sleep, about a tenth of a millisecond. By default it is
hundreds of times that: where another process has one of the cores, the thread that waits for its sibling keeps the
other one from it, and a training step takes ten to thirty times as long."""


@dataclass(frozen=True)
class Seat:
    """The place of a worker in its group. The default is that of a worker alone in this process."""

    group: str = "local"
    """Name of the group, for messages."""
    rank: int = 0
    """Rank in the group."""
    world_size: int = 1
    """Workers of the group."""
    local_rank: int = 0
    """Rank among the group's workers on the same node."""
    local_world_size: int = 1
    """The group's workers on the same node."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    address: str = "127.0.0.1"
    """Address of its node, as other nodes reach it."""


def assign_seats(group: str, bundle_nodes: Sequence[str], device: str) -> list[tuple[Seat, int]]:
    """Ranks for bundles that may lie on nodes in any order: the neighbours on a node follow each other.

    Args:
        group: Name of the group.
        bundle_nodes: Node of each bundle, by bundle index.
        device: `cpu` or `cuda`.

    Returns:
        Seat and bundle index, in rank order; rank 0 sits on bundle 0.
    """
    nodes = list(dict.fromkeys(bundle_nodes))
    order = sorted(range(len(bundle_nodes)), key=lambda bundle: (nodes.index(bundle_nodes[bundle]), bundle))
    seats = []
    for rank, bundle in enumerate(order):
        neighbours = [other for other in order if bundle_nodes[other] == bundle_nodes[bundle]]
        local = neighbours.index(bundle), len(neighbours)
        seats.append((Seat(group, rank, len(order), *local, device), bundle))
    return seats


class Worker:
    """Base class of roles. When `__init__` of a subclass runs in a group, rank, device and process group are ready."""

    needs_process_group: ClassVar[bool] = True
    """Whether the ranks talk to each other through torch.distributed."""

    env_allow_list: ClassVar[tuple[str, ...]] = (
        *("CUDA_LAUNCH_BLOCKING", "GLOO_*", "NCCL_*", "OMP_*", "PYTORCH_*", "TORCH_*"),
        *("HF_HOME", "HF_HUB_*", "HF_DATASETS_*", "HF_ENDPOINT"),
    )
    """Glob patterns of the driver's environment variables that reach the workers; all others, secrets too, do not."""

    seat: Seat = Seat()
    """Where this worker stands."""

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return self.seat.rank

    @property
    def world_size(self) -> int:
        """Workers of the group."""
        return self.seat.world_size

    @property
    def device(self) -> "torch.device":
        """The device to compute on; a `cuda` worker sees its own GPUs alone, so it is the first one."""
        import torch

        return torch.device("cuda", 0) if self.seat.device == "cuda" else torch.device("cpu")


class RayClassWithInitArgs:
    """A worker class and the arguments that each rank's `__init__` gets."""

    def __init__(self, cls: type[Worker], *args: Any, **kwargs: Any):
        self.cls = cls
        self.args = args
        self.kwargs = kwargs


class Rendezvous:
    """How one process joins its group.

    Args:
        seat: The place of the process.
        timeout_seconds: How long ranks wait for each other, here and in every collective.
    """

    def __init__(self, seat: Seat, timeout_seconds: float):
        self._seat = seat
        self._timeout_seconds = timeout_seconds
        self._store: TCPStore | None = None

    def prepare_environment(self) -> None:
        """Tell libraries the rank and the threads to use, before they are imported.

        Ray otherwise leaves one thread to an actor.
        """
        seat = self._seat
        os.environ |= {
            "RANK": str(seat.rank),
            "WORLD_SIZE": str(seat.world_size),
            "LOCAL_RANK": str(seat.local_rank),
            "LOCAL_WORLD_SIZE": str(seat.local_world_size),
            "OMP_NUM_THREADS": str(self.threads),
            "GOMP_SPINCOUNT": SPIN_COUNT,
        }

    @property
    def threads(self) -> int:
        """Threads of this process: an even share of the CPUs that it may run on."""
        return max(1, len(os.sched_getaffinity(0)) // self._seat.local_world_size)

    def open_store(self, host: str) -> tuple[str, int]:
        """On rank 0: bind a free port at once and say which."""
        from rlhf_runtime.store import open_store

        self._store = open_store(host, self._timeout_seconds)
        return host, self._store.port

    def join(self, address: tuple[str, int]) -> None:
        """Join the process group whose store answers at `address`."""
        import torch
        from torch.distributed import TCPStore, init_process_group

        seat = self._seat
        torch.set_num_threads(self.threads)
        backend = "gloo"
        if seat.device == "cuda":
            torch.cuda.set_device(0)
            backend = "cpu:gloo,cuda:nccl"
        host, port = address
        timeout = timedelta(seconds=self._timeout_seconds)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        init_process_group(backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=timeout)

    def require_device(self) -> None:
        """Refuse to go on without the device that the group computes on.

        Raises:
            InputError: naming the group, where it is `cuda` and this process has no working CUDA.
        """
        if self._seat.device != "cuda":
            return
        import torch

        if not torch.cuda.is_available():
            raise InputError(
                f"group `{self._seat.group}`: got device cuda and no working CUDA in rank {self._seat.rank}; expected "
                f"a CUDA build of torch, a driver and a GPU. Fix: run on a node that has them, or set `device: cpu`"
            )
