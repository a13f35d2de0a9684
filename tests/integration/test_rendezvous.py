"""Many groups that start at the same moment on one machine."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
from rlhf_runtime.single_controller.worker import Rendezvous, Seat

GROUPS, RANKS, ROUNDS = 8, 2, 20
TIMEOUT = 60.0


def run_rank(group: int, rank: int, pipe: Connection) -> None:
    """Start anew as often as it is asked to: `open` answers with an address, an address with the sum of the ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rendezvous = None
    while (order := pipe.recv()) is not None:
        try:
            if order == "open":
                rendezvous = Rendezvous(Seat(f"group {group}", rank, RANKS), TIMEOUT)
                pipe.send(rendezvous.open_store("127.0.0.1"))
                continue
            (rendezvous or Rendezvous(Seat(f"group {group}", rank, RANKS), TIMEOUT)).join(order)
            total = torch.tensor(100 * group + rank)
            dist.all_reduce(total)
            dist.destroy_process_group()
            rendezvous = None
            pipe.send(int(total))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


@pytest.fixture
def pipes() -> Iterator[list[list[Connection]]]:
    """To each rank of each group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "rlhf_runtime.single_controller.worker"])
    ends, processes = [], []
    for group in range(GROUPS):
        own = [context.Pipe() for _ in range(RANKS)]
        processes += [
            context.Process(target=run_rank, args=(group, rank, end), daemon=True) for rank, (_, end) in enumerate(own)
        ]
        ends.append([end for end, _ in own])
    for process in processes:
        process.start()
    yield ends
    for end in (end for own in ends for end in own):
        end.send(None)
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0


def answer(pipe: Connection) -> object:
    assert pipe.poll(TIMEOUT), "no answer"
    return pipe.recv()


def test_eight_groups_starting_at_once_never_meet(pipes: list[list[Connection]]) -> None:
    for _ in range(ROUNDS):
        for first, *_ in pipes:
            first.send("open")
        addresses = [answer(first) for first, *_ in pipes]
        assert len(set(addresses)) == GROUPS
        for own, address in zip(pipes, addresses, strict=True):
            for pipe in own:
                pipe.send(address)
        sums = [[answer(pipe) for pipe in own] for own in pipes]
        assert sums == [[200 * group + 1] * RANKS for group in range(GROUPS)]
