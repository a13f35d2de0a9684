"""How long a worker group takes to its first answer, beside bare Ray actors with the same options.

Both are made in turn on the same reserved bundles, the first of a round changing, after a warm-up, since the machine is
noisy. The workers import neither torch nor vLLM: what is compared is what the group adds to Ray.

    python benchmarks/spawn.py [--workers 8 32 100] [--rounds 3]
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rlhf_runtime.single_controller import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
    reserve,
)


class Bare:
    """What Ray alone starts."""

    def ping(self) -> int:
        return os.getpid()


class Member(Worker):
    """What a group starts."""

    needs_process_group = False

    @register()
    def ping(self) -> int:
        return os.getpid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 100])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds after one warm-up of 2 workers each")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    _compare(2, 1)
    print(f"{'workers':>7} {'bare s':>7} {'group s':>8} {'ratio':>6} {'bare CPU s':>11} {'group CPU s':>12}")
    line = "{workers:7} {bare_seconds:7.2f} {group_seconds:8.2f} {ratio_median:6.2f} "
    line += "{bare_cpu_seconds_a_worker:11.3f} {group_cpu_seconds_a_worker:12.3f}"
    rows = []
    for workers in options.workers:
        rows.append(row := _compare(workers, options.rounds))
        print(line.format(**row))
    ray.shutdown()
    print(json.dumps({"benchmark": "spawn", "rows": rows, "rounds": options.rounds, "cpus": os.cpu_count()}))


def _compare(workers: int, rounds: int) -> dict[str, float]:
    """Seconds to the first answer of all workers and CPU seconds of each, both ways, and the median of the ratios."""
    pool = RayResourcePool("spawn", workers, {"CPU": 0.001}, "PACK")
    reserve([pool], 60)
    ways = {"bare": _bare, "group": _group}
    samples = []
    for number in range(rounds):
        order = list(ways) if number % 2 == 0 else list(reversed(ways))
        samples.append({way: ways[way](pool) for way in order})
    pool.remove()
    ratios = [sample["group"][0] / sample["bare"][0] for sample in samples]
    row = {"workers": workers, "ratio_median": round(statistics.median(ratios), 3)}
    for way in ways:
        seconds, cpu_seconds = (statistics.median(values) for values in zip(*(s[way] for s in samples), strict=True))
        row |= {f"{way}_seconds": round(seconds, 2), f"{way}_cpu_seconds_a_worker": round(cpu_seconds, 3)}
    return row


def _bare(pool: RayResourcePool) -> tuple[float, float]:
    begin = time.perf_counter()
    actor = ray.remote(num_cpus=0, num_gpus=0)(Bare)
    bundles = (PlacementGroupSchedulingStrategy(pool.placement_group, bundle) for bundle in range(pool.workers))
    actors = [actor.options(scheduling_strategy=bundle).remote() for bundle in bundles]
    pids = ray.get([actor.ping.remote() for actor in actors])
    return _timed(begin, pids, lambda: [ray.kill(actor) for actor in actors])


def _group(pool: RayResourcePool) -> tuple[float, float]:
    begin = time.perf_counter()
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Member))
    return _timed(begin, group.ping(), group.shutdown)


def _timed(begin: float, pids: list[int], end_workers: Callable[[], object]) -> tuple[float, float]:
    """Seconds since `begin`, and CPU seconds a worker; the workers are gone before anything else is timed."""
    seconds = time.perf_counter() - begin
    cpu_seconds = statistics.mean(map(_cpu_seconds, pids))
    end_workers()
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.05)
    return seconds, cpu_seconds


def _cpu_seconds(pid: int) -> float:
    """What a process has used since it began, on a busy machine a steadier measure than time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
