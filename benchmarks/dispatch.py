"""What a call on a worker group costs the driver, beside the naive way: the whole batch pickled to every rank.

Both are run in turn, after a warm-up, since the machine is noisy. Each rank gives its chunk back, so that a batch
travels both ways. With `--step` a short run on 8 training ranks tells, besides, in which share of a step none works.

    python benchmarks/dispatch.py [--workers 2 8] [--megabytes 1 100] [--rounds 5] [--step]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ray
import ruamel.yaml
import torch
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import from_values
from rlhf_runtime.single_controller import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, reserve

MANIFEST = Path(__file__).parents[1] / "examples" / "01-quickstart.yaml"
ROWS = 1024
MEGABYTE = 10**6
STEP_RANKS = 8
STEPS = 8
STEPS_TO_WARM_UP = 3


class CountedBatch(DataProto):
    """A batch that counts what is pickled of it and of its chunks."""

    pickles = 0
    sent_bytes = 0

    def __reduce__(self):
        CountedBatch.pickles += 1
        columns = (column.values() if column.is_nested else column for column in self.batch.values())
        CountedBatch.sent_bytes += sum(column.nbytes for column in columns)
        return super().__reduce__()


class Echo(Worker):
    """A rank that gives back its rows, as a plain batch: a `CountedBatch` would bring its own counts along."""

    needs_process_group = False

    def echo(self, chunk: DataProto) -> DataProto:
        return DataProto(chunk.batch)

    def own_chunk(self, batch: DataProto) -> DataProto:
        return DataProto(batch.chunk(self.world_size)[self.rank].batch)


class Sample(NamedTuple):
    """One batch there and back."""

    submit: float
    """Seconds until the call is on its way: cutting, serialising, submitting."""
    collect: float
    """Seconds from then until the answers are one batch, which includes the ranks' own work."""
    sent_megabytes: float
    """Serialised by the driver."""
    pickles: float
    """Serialisations by the driver: of chunks, or of the whole batch."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds after one warm-up")
    parser.add_argument("--step", action="store_true", help="also run a job and measure the driver's share of a step")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows = []
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=3e9)
    print(f"{'workers':>7} {'MB':>5} {'way':>6} {'submit s':>9} {'collect s':>9} {'sent MB':>8} {'pickles':>8}")
    line = "{workers:7} {megabytes:5} {way:>6} {submit:9.4f} {collect:9.4f} {sent_megabytes:8.1f} {pickles:8.0f}"
    for workers in options.workers:
        for row in _compare(workers, options.megabytes, options.rounds):
            rows.append(row)
            print(line.format(**row))
    ray.shutdown()
    result = {"benchmark": "dispatch", "rows": rows, "rounds": options.rounds, "cpus": os.cpu_count()}
    if options.step:
        result["driver_share_of_step"] = share = round(_driver_share(), 4)
        print(f"driver's share of a step on {STEP_RANKS} training ranks: {share:.2%}")
    print(json.dumps(result))


def _compare(workers: int, sizes: list[int], rounds: int) -> list[dict[str, float | str]]:
    """Medians of both ways for each size of batch."""
    pool = RayResourcePool("echo", workers, {"CPU": 0.01}, "PACK")
    reserve([pool], 60)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo))
    group.wait_ready()
    rows = []
    for megabytes in sizes:
        batch = _batch(megabytes)
        samples = [
            {"ours": _sample(_ours, group, batch), "naive": _sample(_naive, group, batch)} for _ in range(rounds + 1)
        ]
        for way in ("ours", "naive"):
            medians = (statistics.median(values) for values in zip(*(s[way] for s in samples[1:]), strict=True))
            figures = Sample(*(round(figure, 4) for figure in medians))
            rows.append({"workers": workers, "megabytes": megabytes, "way": way, **figures._asdict()})
    group.shutdown()
    pool.remove()
    return rows


def _batch(megabytes: int) -> CountedBatch:
    """Half of the bytes in a dense column, half in a ragged one."""
    length = megabytes * MEGABYTE // ROWS // 8
    counts = torch.full((ROWS,), length)
    counts[::2] -= length // 2
    counts[1::2] += length // 2
    dense, values = torch.rand(ROWS, length), torch.rand(ROWS * length)
    return CountedBatch.from_dict({"dense": dense, "ragged": from_values(values, counts)})


def _sample(
    way: Callable[[RayWorkerGroup, DataProto], tuple[float, DataProto]], group: RayWorkerGroup, batch: CountedBatch
) -> Sample:
    CountedBatch.pickles = CountedBatch.sent_bytes = 0
    begin = time.perf_counter()
    submitted, answer = way(group, batch)
    end = time.perf_counter()
    assert torch.equal(answer.batch["dense"], batch.batch["dense"]), "the batch came back changed"
    return Sample(submitted - begin, end - submitted, CountedBatch.sent_bytes / MEGABYTE, CountedBatch.pickles)


def _ours(group: RayWorkerGroup, batch: DataProto) -> tuple[float, DataProto]:
    future = group.async_run_method_batch("echo", batch)
    return time.perf_counter(), future.get()


def _naive(group: RayWorkerGroup, batch: DataProto) -> tuple[float, DataProto]:
    refs = [worker.own_chunk.remote(batch) for worker in group.workers]
    return time.perf_counter(), DataProto.concat([ray.get(ref) for ref in refs])


def _driver_share() -> float:
    """Seconds of a step in which no worker works, by seconds of the step: the median over a run's warm steps."""
    with tempfile.TemporaryDirectory() as folder:
        job = ruamel.yaml.YAML().load(MANIFEST)
        job["spec"]["training"]["steps"] = STEPS
        job["spec"]["placement"]["groups"] = [
            {"name": "training", "pool": "local", "roles": ["policy", "critic", "reference"], "workers": STEP_RANKS},
            {"name": "rollout", "pool": "local", "roles": ["rollout"]},
            {"name": "reward", "pool": "local", "roles": ["reward"]},
        ]
        ruamel.yaml.YAML().dump(job, Path(folder) / "job.yaml")
        command = [Path(sys.executable).parent / "rlhf", "run", "job.yaml", "--runs-dir", "runs"]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (metrics,) = Path(folder).glob("runs/*/metrics.jsonl")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median(line["time/driver"] / line["time/step"] for line in lines[STEPS_TO_WARM_UP:])


if __name__ == "__main__":
    main()
