"""The training workers on 2 real ranks (processes, gloo) against 1: what is learned must not depend on the number.

Run as a program, this file is one of the ranks.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rlhf_api import RuntimeConfig
from rlhf_runtime.errors import DesyncError
from rlhf_runtime.hugging_face import Trained
from rlhf_runtime.models import load_tokenizer
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.replicas import require_agreement
from rlhf_runtime.single_controller.worker import Seat
from rlhf_runtime.workers.critic import CriticWorker
from rlhf_runtime.workers.policy import PolicyWorker

SIZES = [(3, 5), (9, 1), (1, 8), (6, 3), (2, 6)]
"""Prompt and response tokens of each row: in chunks of 2 ranks, the first is longer and needs more micro-batches."""
CASES = [(rows, tokens) for rows in (1, 2, 5) for tokens in (1, 24, 512)]
"""Rows of the batch, and the token budget of a micro-batch."""

BUFFER = "network.model.rotary_emb.inv_freq"
"""What FSDP does not shard."""


@dataclass(frozen=True)
class Outcome:
    """What one run of a case ended with."""

    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]
    log_probs: list[torch.Tensor]
    values: list[torch.Tensor]


def config(folder: Path) -> RuntimeConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = {
        "architecture": "qwen2",
        # an odd vocabulary does not divide by the ranks; strong weights make outputs peaked
        "config": {**sizes, "num_key_value_heads": 1, "vocab_size": 99, "initializer_range": 0.3},
    }
    optimizer = {"learningRate": 0.0}
    group = {"name": "all", "roles": ["policy", "critic"], "workers": 1, "device": "cpu", "gpusPerWorker": 0}
    return RuntimeConfig.parse(
        {
            "schemaVersion": 1,
            "name": "ranks",
            "runDir": str(folder),
            "seed": 0,
            "models": {role: {"random": model} for role in ("policy", "critic", "reference")},
            "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
            "data": {"prompts": {"builtin": "arithmetic"}},
            "algorithm": {
                "ppo": {"kl": {"in": "loss", "estimator": "k3", "coefficient": 0.1}, "entropyCoefficient": 0.1}
            },
            "rollout": {"temperature": 0.7},
            "training": {
                "steps": 1,
                "policyOptimizer": optimizer,
                "criticOptimizer": optimizer,
                "microBatchTokens": 512,
                "dtype": "float32",
                "activationCheckpointing": False,
            },
            "groups": [{**group, "bundle": {"CPU": 1}, "strategy": "PACK", "fallback": []}],
            "engines": 1,
            "weightSync": {
                "transport": "shm",
                "reason": "one node",
                "bucketBytes": 1024,
                "verify": True,
                "timeoutSeconds": 60,
            },
            "pythonPath": [],
            "observability": {},
            "checkpoint": None,
            "localNodes": [],
        }
    )


def experience(rows: int) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(2, 97, (count,), generator=generator)  # noqa: E731
    sizes = SIZES[:rows]
    tokens = {"prompt_ids": [draw(p) for p, _ in sizes], "response_ids": [draw(r) for _, r in sizes]}
    columns = ("old_log_probs", "ref_log_probs", "advantages", "returns", "values")
    floats = {name: [torch.randn(r, generator=generator) for _, r in sizes] for name in columns}
    return DataProto.from_dict({name: ragged(column) for name, column in {**tokens, **floats}.items()})


def chunk_of(batch: DataProto, rank: int, world_size: int) -> DataProto:
    """What dispatch hands to a rank."""
    return batch.pad_to_multiple(world_size)[0].chunk(world_size)[rank]


def record_gradients(worker: PolicyWorker | CriticWorker, into: dict[str, torch.Tensor]) -> None:
    """Keep the whole gradient of each step, which the step forgets."""
    stepper = worker.engine.stepper
    take = stepper.step

    def step(loss: torch.Tensor):
        for name, parameter in worker.engine.module.named_parameters():
            into[f"{stepper.name}: {name}"] = parameter.grad.full_tensor().clone()
        return take(loss)

    stepper.step = step


def play(folder: Path, rank: int, world_size: int) -> dict[tuple[int, int], Outcome]:
    """All cases on this rank, with weights that stay as they are, and an export at the end."""
    seat = {"seat": Seat(rank=rank, world_size=world_size)}
    policy = type("Policy", (PolicyWorker,), seat)(config(folder))
    critic = type("Critic", (CriticWorker,), seat)(config(folder))
    torch.nn.init.constant_(critic.engine.module.value_head.weight, 0.1)
    gradients: dict[str, torch.Tensor] = {}
    record_gradients(policy, gradients)
    record_gradients(critic, gradients)
    outcomes = {}
    for rows, tokens in CASES:
        policy.engine.micro_batch_tokens = critic.engine.micro_batch_tokens = tokens
        batch = chunk_of(experience(rows), rank, world_size)
        metrics = policy.update(batch) | critic.update(batch)
        log_probs = policy.compute_log_probs(batch).batch["old_log_probs"].unbind()
        values = critic.compute_values(batch).batch["values"].unbind()
        outcomes[rows, tokens] = Outcome(metrics, dict(gradients), list(log_probs), list(values))
    policy.export(str(folder / f"export-{world_size}"), Trained(step=1))
    torch.save([policy.digests(), damaged(policy).digests()], folder / f"digests-{rank}-of-{world_size}.pt")
    return outcomes


def damaged(policy: PolicyWorker) -> PolicyWorker:
    """The worker after one bit of what every rank has whole was lost on rank 1."""
    if policy.rank == 1:
        name, buffer = next(iter(policy.engine.module.named_buffers()))
        assert name == BUFFER
        buffer.view(torch.int32)[0] ^= 1
    return policy


def play_in_group(folder: Path, rank: int, world_size: int) -> dict[tuple[int, int], Outcome]:
    store = f"file://{folder}/store-{world_size}"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    try:
        return play(folder, rank, world_size)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def main() -> None:
    folder, rank, world_size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    outcomes = play_in_group(folder, rank, world_size)
    torch.save({case: vars(outcome) for case, outcome in outcomes.items()}, folder / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, dict[tuple[int, int], Outcome]]:
    """Those of this process alone, and of the 2 ranks that it started."""
    ranks = [subprocess.Popen([sys.executable, __file__, str(folder), str(rank), "2"]) for rank in range(2)]
    try:
        found = {"alone": play_in_group(folder, 0, 1)}
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank in range(2):
        saved = torch.load(folder / f"rank-{rank}.pt")
        found[f"rank {rank}"] = {case: Outcome(**fields) for case, fields in saved.items()}
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_metrics_and_gradients_are_those_of_one_rank(outcomes, case: tuple[int, int]) -> None:
    alone = outcomes["alone"][case[0], 512]
    for outcome in (outcomes["alone"][case], outcomes["rank 0"][case], outcomes["rank 1"][case]):
        assert outcome.metrics == pytest.approx(alone.metrics, rel=1e-3, abs=1e-5)
        for name, expected in alone.gradients.items():
            scale = expected.abs().max().item()
            torch.testing.assert_close(outcome.gradients[name], expected, atol=1e-4 * scale, rtol=1e-3)
    assert alone.metrics["grad_norm"] > 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scores_keep_their_rows_and_are_those_of_one_rank(outcomes, case: tuple[int, int]) -> None:
    alone = outcomes["alone"][case[0], 512]
    for column in ("log_probs", "values"):
        joined = [row for rank in ("rank 0", "rank 1") for row in getattr(outcomes[rank][case], column)]
        torch.testing.assert_close(joined[: case[0]], getattr(alone, column), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("outcomes")
def test_two_ranks_export_the_model_that_one_does(folder: Path) -> None:
    from safetensors.torch import load_file

    one, two = (load_file(folder / f"export-{ranks}" / "model.safetensors") for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert load_tokenizer(folder / "export-2").eos_token_id is not None


@pytest.mark.usefixtures("outcomes")
def test_ranks_agree_until_one_bit_of_one_of_them_is_lost(folder: Path) -> None:
    ranks = [torch.load(folder / f"digests-{rank}-of-2.pt") for rank in range(2)]
    before, after = ([rank[index] for rank in ranks] for index in range(2))
    [alone, _] = torch.load(folder / "digests-0-of-1.pt")
    assert before == [alone, alone]
    require_agreement("policy", before)
    with pytest.raises(DesyncError, match=rf"^policy: got {BUFFER} \d+ on rank 1; expected \d+, as on rank 0"):
        require_agreement("policy", after)


if __name__ == "__main__":
    main()
