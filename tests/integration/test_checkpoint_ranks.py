"""Policy and critic on real ranks (processes, gloo), stopped and resumed: bit for bit on as many, closely on others.

Run as a program, this file is one of two ranks.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rlhf_api import RuntimeConfig
from rlhf_runtime.checkpoint.shards import ShardReader
from rlhf_runtime.engines.training_state import snapshot
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.single_controller.worker import Seat
from rlhf_runtime.workers.critic import CriticWorker
from rlhf_runtime.workers.minibatch import DEALT
from rlhf_runtime.workers.policy import PolicyWorker

STEPS, SAVED = 4, 2
"""Updates of a run, and after how many of them it saves."""
ROWS = [(3, 5), (9, 2), (1, 8), (6, 3), (2, 6), (4, 1)]
"""Prompt and response tokens."""

Outcome = dict[str, torch.Tensor | float]
"""What a run ends with: its metrics after the save, and every tensor of models and optimizers, whole."""


def config(folder: Path) -> RuntimeConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {
        "architecture": "qwen2",
        # an odd vocabulary does not divide by the ranks; tied weights must stay so
        "config": {**sizes, "num_key_value_heads": 1, "vocab_size": 99, "tie_word_embeddings": True},
    }
    group = {"name": "all", "roles": ["policy", "critic"], "workers": 1, "device": "cpu", "gpusPerWorker": 0}
    optimizer = {"learningRate": 1e-2, "warmupSteps": 6}  # the warm-up ends after the save
    sync = {"transport": "shm", "reason": "", "bucketBytes": 1024, "verify": True, "timeoutSeconds": 60}
    return RuntimeConfig.parse(
        {
            "schemaVersion": 1,
            "name": "resumed",
            "runDir": str(folder),
            "seed": 0,
            "models": {role: {"random": model} for role in ("policy", "critic", "reference")},
            "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
            "data": {"prompts": {"builtin": "arithmetic"}},
            "algorithm": {"ppo": {"epochs": 2, "miniBatchSize": 4}},
            "rollout": {},
            "training": {
                "steps": STEPS,
                "policyOptimizer": optimizer,
                "criticOptimizer": optimizer,
                "microBatchTokens": 24,
                "dtype": "float32",
                "activationCheckpointing": False,
            },
            "groups": [{**group, "bundle": {"CPU": 1}, "strategy": "PACK", "fallback": []}],
            "engines": 1,
            "weightSync": sync,
            "checkpoint": None,
            "pythonPath": [],
            "observability": {},
            "localNodes": [],
        }
    )


def experience(step: int) -> DataProto:
    generator = torch.Generator().manual_seed(step)
    draw = lambda count: torch.randint(2, 97, (count,), generator=generator)  # noqa: E731
    tokens = {"prompt_ids": [draw(p) for p, _ in ROWS], "response_ids": [draw(r) for _, r in ROWS]}
    columns = ("old_log_probs", "ref_log_probs", "advantages", "returns", "values")
    floats = {name: [torch.randn(r, generator=generator) for _, r in ROWS] for name in columns}
    return DataProto.from_dict({name: ragged(column) for name, column in {**tokens, **floats}.items()})


def hand(step: int, rank: int, world_size: int) -> DataProto:
    """What a rank is dealt of a step."""
    return DEALT.dispatch(world_size, (experience(step),), {}).args[0].values[rank]


def play(folder: Path, rank: int, world_size: int, source: int | None) -> Outcome:
    """A run from its start, or from what `source` ranks saved."""
    seat = {"seat": Seat(rank=rank, world_size=world_size)}
    workers = {cls.role: type(cls.__name__, (cls,), seat)(config(folder)) for cls in (PolicyWorker, CriticWorker)}
    random.seed(rank)
    torch.manual_seed(rank)
    saves = folder / f"saved-by-{source or world_size}"
    saves.mkdir(exist_ok=True)
    if source is not None:
        for worker in workers.values():
            worker.load(str(saves), source)
    outcome: Outcome = {}
    for step in range(1 if source is None else SAVED + 1, STEPS + 1):
        random.random()
        torch.rand(())
        metrics = {
            name: value
            for worker in workers.values()
            for name, value in worker.update(hand(step, rank, world_size)).items()
        }
        if step > SAVED:
            outcome |= {f"{name} of step {step}": value for name, value in metrics.items()}
        if step == SAVED:
            for worker in workers.values():
                worker.save(str(saves))
    if source is None:
        for worker in workers.values():
            assert worker.saved(wait=True).bytes > 0
    dist.barrier()
    outcome |= {"drawn by Python": random.random(), "drawn by torch": torch.rand(()).item()}
    return outcome | {f"{role}/{name}": tensor for role, worker in workers.items() for name, tensor in whole(worker)}


def whole(worker: PolicyWorker | CriticWorker) -> list[tuple[str, torch.Tensor]]:
    """Model and optimizer, gathered from the ranks."""
    parts: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, snapshot(worker.engine.module, worker.engine.stepper))
    names = dict.fromkeys(name for part in parts for name in part)
    shards = {name: [part[name] for part in parts if name in part] for name in names}
    return [(name, torch.cat([s.rows for s in own]) if own[0].shape else own[0].rows) for name, own in shards.items()]


def play_in_group(folder: Path, rank: int, world_size: int, sources: list[int | None]) -> list[Outcome]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{world_size}-{sources[0]}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        return [play(folder, rank, world_size, source) for source in sources]
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[tuple[int, int | None], list[Outcome]]:
    """By ranks and by whose save they went on from: the outcome of each rank."""
    [alone] = play_in_group(folder, 0, 1, [None])
    ranks = [subprocess.Popen([sys.executable, __file__, str(folder), str(rank)]) for rank in range(2)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    two = [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]
    again, narrowed = play_in_group(folder, 0, 1, [1, 2])
    found = {(1, None): [alone], (1, 1): [again], (1, 2): [narrowed]}
    return found | {(2, source): [rank[at] for rank in two] for at, source in enumerate((None, 2, 1))}


@pytest.mark.parametrize("ranks", [1, 2])
def test_resumed_on_as_many_ranks_all_is_as_if_never_stopped(outcomes, ranks: int) -> None:
    for unbroken, resumed in zip(outcomes[ranks, None], outcomes[ranks, ranks], strict=True):
        assert unbroken.keys() == resumed.keys()
        assert {name.split("/")[1] for name in unbroken if "/" in name} == {"model", "exp_avg", "exp_avg_sq", "step"}
        different = [
            name for name, value in unbroken.items() if not torch.equal(*map(torch.as_tensor, (value, resumed[name])))
        ]
        assert different == []


@pytest.mark.parametrize(("ranks", "source"), [(2, 1), (1, 2)])
def test_resumed_on_other_ranks_the_result_is_the_same(outcomes, ranks: int, source: int) -> None:
    unbroken, resumed = outcomes[source, None][0], outcomes[ranks, source][0]
    assert unbroken.keys() == resumed.keys()
    for name in unbroken:
        if not name.startswith("drawn") or (ranks, source) == (1, 2):
            torch.testing.assert_close(
                resumed[name], unbroken[name], atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.usefixtures("outcomes")
def test_two_ranks_save_what_one_does_each_half_of_it(folder: Path) -> None:
    for role in ("policy", "critic"):
        with (
            ShardReader(folder / "saved-by-1", role, 1) as one,
            ShardReader(folder / "saved-by-2", role, 2) as two,
        ):
            assert one.shapes == two.shapes
        sizes = [path.stat().st_size for path in sorted((folder / "saved-by-2").glob(f"{role}-*"))]
        assert max(sizes) < 1.2 * min(sizes)


if __name__ == "__main__":
    place, own_rank = Path(sys.argv[1]), int(sys.argv[2])
    torch.save(play_in_group(place, own_rank, 2, [None, 2, 1]), place / f"rank-{own_rank}.pt")
