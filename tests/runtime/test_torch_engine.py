"""The torch engine and the training workers on one rank, against transformers and plain torch."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from rlhf_api import RuntimeConfig
from rlhf_api.roles import ModelSource, RandomModel
from rlhf_api.training import Optimizer
from rlhf_runtime.engines import torch_engine
from rlhf_runtime.engines.sequences import Sequences
from rlhf_runtime.engines.torch_engine import TorchEngine
from rlhf_runtime.errors import InputError, NumericalError, ResourceError
from rlhf_runtime.hugging_face import Trained
from rlhf_runtime.models import load_tokenizer, materialize
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.workers.critic import CriticWorker
from rlhf_runtime.workers.policy import PolicyWorker
from rlhf_runtime.workers.reference import ReferenceWorker
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("one_rank")

CPU = torch.device("cpu")
SIZES = [(3, 5), (9, 1), (1, 8), (6, 3), (2, 6)]
"""Prompt and response tokens of each row of the tests' batch."""

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, make_peaked: Callable[..., Path]) -> Path:
    return make_peaked(tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def peaked(make_peaked: Callable[..., Path]) -> Path:
    return make_peaked(tie_word_embeddings=False)


def sequences(sizes: list[tuple[int, int]] = SIZES, seed: int = 0) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(2, 97, (count,), generator=generator)  # noqa: E731
    return Sequences([draw(p) for p, _ in sizes], [draw(r) for _, r in sizes])


def engine(folder: Path, *, head: str = "lm", tokens: int = 1000, rate: float | None = None, **options) -> TorchEngine:
    optimizer = None if rate is None else Optimizer(learning_rate=rate, **options.pop("optimizer", {}))
    return TorchEngine(folder, head=head, device=CPU, micro_batch_tokens=tokens, optimizer=optimizer, **options)


def weights(trained: TorchEngine) -> Weights:
    return {name: parameter.full_tensor().clone() for name, parameter in trained.module.named_parameters()}


def mean_loss(rows: Sequences) -> Callable[..., torch.Tensor]:
    return lambda outputs, at: -outputs[0].sum() / rows.tokens


def left_padded_scores(folder: Path, rows: Sequences, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies by transformers, from a left-padded batch with positions from the mask."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    lines = [torch.cat(pair) for pair in zip(rows.prompts, rows.responses, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_side="left")
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(line) for line in lines], True, padding_side="left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = network(input_ids=ids, attention_mask=mask, position_ids=positions).logits.double() / temperature
    log_softmax = logits.log_softmax(-1)[:, :-1]
    taken = log_softmax.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    counts = [len(response) for response in rows.responses]
    ends = lambda table: torch.cat([row[-count:] for row, count in zip(table, counts, strict=True)])  # noqa: E731
    return ends(taken).float(), ends(entropy).float()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_transformers(folder: Path, temperature: float) -> None:
    rows = sequences()
    log_probs, entropy = engine(folder, temperature=temperature).score(rows)
    expected = left_padded_scores(folder, rows, temperature)
    assert entropy.mean() < 3, "not a peaked model"
    torch.testing.assert_close((log_probs, entropy), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("tokens", [1, 25, 1000])
def test_a_row_scores_the_same_alone_and_among_others(peaked: Path, head: str, tokens: int) -> None:
    rows = sequences()
    scorer = engine(peaked, head=head, tokens=tokens, rate=1.0)
    if head == "value":
        seeded = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(scorer.module.value_head.weight, std=0.1, generator=seeded)  # values of the size of 1
    together = scorer.score(rows)
    alone = [scorer.score(Sequences([p], [r])) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    for index, column in enumerate(together):
        torch.testing.assert_close(column, torch.cat([row[index] for row in alone]), atol=1e-5, rtol=0)
        assert column.std() > 0.1


def test_the_sampled_token_alone_decides_its_log_probability(peaked: Path) -> None:
    rows = sequences([(4, 6)])
    changed = rows.responses[0].clone()
    changed[3] += 1
    before, after = (engine(peaked).score(Sequences(rows.prompts, [r]))[0] for r in (rows.responses[0], changed))
    assert torch.equal(before[:3], after[:3])
    assert (before[3:] - after[3:]).abs().min() > 1e-3


def gradient(peaked: Path, rows: Sequences, tokens: int) -> Weights:
    trained = engine(peaked, tokens=tokens, rate=1.0)
    trained.accumulate(rows, mean_loss(rows))
    return {name: parameter.grad.full_tensor() for name, parameter in trained.module.named_parameters()}


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_gradients_depend_neither_on_micro_batches_nor_on_order(peaked: Path, tokens: int, order: list[int]) -> None:
    rows = sequences()
    mixed = Sequences([rows.prompts[i] for i in order], [rows.responses[i] for i in order])
    expected, got = gradient(peaked, rows, 1000), gradient(peaked, mixed, tokens)
    scale = max(value.abs().max() for value in expected.values()).item()
    torch.testing.assert_close(got, expected, atol=1e-5 * scale, rtol=1e-4)


def test_steps_are_those_of_plain_torch(folder: Path) -> None:
    rows = sequences()
    settings = {"warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5}
    ours = engine(folder, tokens=30, rate=1e-2, optimizer=settings)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0, betas=(0.9, 0.999), weight_decay=0.1)
    for rate in (0.5e-2, 1e-2, 1e-2):
        total = torch.zeros(())
        for prompt, response in zip(rows.prompts, rows.responses, strict=True):
            line = torch.cat([prompt, response])
            log_softmax = plain(input_ids=line[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            total = total - log_softmax.gather(-1, response[:, None]).sum() / rows.tokens
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        step = ours.train_step(rows, mean_loss(rows))
        assert step.loss == pytest.approx(total.item(), rel=1e-3)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-2)
        assert norm > 0.5, "nothing to clip"
        assert ours.learning_rate == pytest.approx(rate)
    torch.testing.assert_close(
        {name.removeprefix("network."): value for name, value in weights(ours).items()},
        dict(plain.named_parameters()),
        atol=2e-3,
        rtol=1e-3,
    )


def test_learning_rate_0_keeps_every_bit(peaked: Path) -> None:
    trained = engine(peaked, rate=0.0)
    before = weights(trained)
    trained.train_step(sequences(), mean_loss(sequences()))
    for name, value in weights(trained).items():
        assert torch.equal(value, before[name])


def test_an_export_is_the_trained_model(folder: Path, tmp_path: Path) -> None:
    trained = engine(folder, rate=1e-2)
    trained.train_step(sequences(), mean_loss(sequences()))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.bin").touch()
    trained.export(tmp_path / "out", Trained(step=1))
    scores = trained.score(sequences())
    assert all(map(torch.equal, engine(tmp_path / "out").score(sequences()), scores))
    torch.testing.assert_close(left_padded_scores(tmp_path / "out", sequences(), 1.0), scores, atol=1e-4, rtol=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    saved = {name.removeprefix("network."): value for name, value in weights(trained).items()}
    assert all(torch.equal(parameter, saved[name]) for name, parameter in loaded.named_parameters())
    assert loaded.config.tie_word_embeddings == ("lm_head.weight" not in saved)
    assert load_tokenizer(tmp_path / "out").encode("1+2=") == load_tokenizer(folder).encode("1+2=")
    assert not (tmp_path / "out" / "stale.bin").exists()


def test_no_rank_waits_for_the_one_that_writes(peaked: Path, tmp_path: Path, monkeypatch) -> None:
    collectives: list[int] = []
    begun = dist.distributed_c10d._get_default_group()._get_sequence_number_for_group
    monkeypatch.setattr(torch_engine, "write_model", lambda *_: collectives.append(begun()))
    engine(peaked).export(tmp_path / "out", Trained(step=1))
    assert collectives == [begun()]


def test_a_folder_that_lacks_weights_is_refused(peaked: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lacking = tmp_path / "lacking"
    engine(peaked, rate=1.0).export(lacking, Trained(step=0))
    state = load_file(lacking / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, lacking / "model.safetensors", metadata={"format": "pt"})
    for head in ("lm", "value"):
        with pytest.raises(InputError, match=r"up_proj.*Fix:"):
            engine(lacking, head=head)
    state = load_file(peaked / "model.safetensors")
    state["model.norm.weight"][0] = math.nan
    broken = shutil.copytree(peaked, tmp_path / "broken")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"got logits that are not finite.*Fix:"):
        engine(broken)
    other = shutil.copytree(peaked, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    for head in ("lm", "value"):
        with pytest.raises(InputError, match=r"\d weights of another shape .*(embed|lm_head).*; expected \[.*Fix:"):
            engine(other, head=head)
    with pytest.raises(InputError, match="Fix:"):
        engine(tmp_path)


# ---- workers


def experience(rows: Sequences, policy: PolicyWorker, advantages: Callable[[int], torch.Tensor]) -> DataProto:
    batch = DataProto.from_dict({"prompt_ids": ragged(rows.prompts), "response_ids": ragged(rows.responses)})
    column = ragged([advantages(len(response)) for response in rows.responses])
    return batch.union(policy.compute_log_probs(batch)).union(DataProto.from_dict({"advantages": column}))


def with_policy(config: RuntimeConfig, folder: Path, **optimizer) -> RuntimeConfig:
    source = ModelSource(path=str(folder))
    models = config.models.model_copy(update={"policy": source, "critic": source, "reference": source})
    settings = Optimizer(**{"learning_rate": 1e-3, **optimizer})
    training = config.training.model_copy(update={"policy_optimizer": settings, "critic_optimizer": settings})
    return config.model_copy(update={"models": models, "training": training})


def test_an_update_favours_tokens_of_positive_advantage(make_config, peaked: Path) -> None:
    policy = PolicyWorker(with_policy(make_config(), peaked))
    batch = experience(sequences(), policy, lambda count: torch.tensor([1.0, -1.0]).repeat(count)[:count])
    before = batch.batch["old_log_probs"].values()
    metrics = policy.update(batch)
    change = policy.compute_log_probs(batch).batch["old_log_probs"].values() - before
    signs = batch.batch["advantages"].values()
    assert (change * signs).sum() > 0
    assert change[signs > 0].mean() > 0 > change[signs < 0].mean()
    assert metrics["ratio_max_deviation"] < 1e-4
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy_loss"] == pytest.approx(-signs.mean().item(), abs=1e-5)
    assert metrics["learning_rate"] == 1e-3


def test_an_update_of_one_step_scores_what_it_trains_on(make_config, peaked: Path) -> None:
    kl = {"in": "loss", "estimator": "k3", "coefficient": 0.1}
    config = with_policy(make_config(algorithm={"ppo": {"kl": kl, "entropyCoefficient": 0.1, "epochs": 1}}), peaked)
    told, untold = PolicyWorker(config), PolicyWorker(config)
    for policy in (told, untold):
        policy.engine.micro_batch_tokens = 20
    batch = experience(sequences(), told, lambda count: torch.arange(count) - 1.5)
    batch = batch.union(DataProto.from_dict({"ref_log_probs": ragged([torch.full((r,), -2.0) for _, r in SIZES])}))
    batch = batch.pad_to_multiple(4)[0]
    columns = ["prompt_ids", "response_ids", "valid", "advantages", "ref_log_probs"]
    metrics = untold.update(batch.select(columns))
    assert metrics == pytest.approx(told.update(batch), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(weights(untold.engine), weights(told.engine), atol=1e-5, rtol=1e-4)
    for name, column in untold.scored().batch.items():
        torch.testing.assert_close(column.values(), batch.batch[name].values(), atol=1e-5, rtol=1e-5)
    untold.settings = config.algorithm.settings.model_copy(update={"epochs": 2})
    with pytest.raises(AssertionError, match="weights that change"):
        untold.update(batch.select(columns))


@pytest.mark.parametrize("mini_batch_size", [None, 1, 2, 3, 7])
def test_any_mini_batch_size_takes_each_row_once_an_epoch(make_config, peaked: Path, mini_batch_size) -> None:
    config = make_config(algorithm={"ppo": {"miniBatchSize": mini_batch_size, "epochs": 2}})
    policy = PolicyWorker(with_policy(config, peaked, learning_rate=0.0))
    batch = experience(sequences(), policy, torch.ones)
    metrics = policy.update(batch)
    assert metrics["policy_loss"] == pytest.approx(-1, abs=1e-5)
    assert policy.engine.stepper.steps == 2 * math.ceil(5 / (mini_batch_size or 5))


@pytest.mark.parametrize("rows", range(1, 6))
def test_padding_rows_change_nothing(make_config, peaked: Path, rows: int) -> None:
    results = []
    for multiple in (1, 4):
        config = with_policy(make_config(), peaked, learning_rate=0.0)
        policy, critic = PolicyWorker(config), CriticWorker(config)
        batch = experience(sequences(SIZES[:rows]), policy, lambda count: torch.arange(count) + 1.0)
        extra = dict.fromkeys(("returns", "values"), batch.batch["advantages"])
        tokens = len(batch.batch["advantages"].values())
        batch = batch.union(DataProto.from_dict(extra)).pad_to_multiple(multiple)[0]
        for name in ("advantages", "returns", "values"):
            batch.batch[name].values()[tokens:] = math.nan
        results.append(policy.update(batch) | critic.update(batch))
    assert results[0] == pytest.approx(results[1], rel=1e-4, abs=1e-5)
    assert results[0]["grad_norm"] > 0


@pytest.mark.parametrize("aggregation", ["tokenMean", "sequenceMeanTokenMean", "sequenceMeanTokenSum", "constant"])
def test_an_update_weighs_tokens_alike_in_any_micro_batches_order_and_padding(
    make_config, peaked: Path, aggregation: str
) -> None:
    rows, lens = sequences(), torch.tensor([response for _, response in SIZES])
    weight = {
        "tokenMean": torch.full((5,), 1 / 23),
        "sequenceMeanTokenMean": 1 / (5 * lens),
        "sequenceMeanTokenSum": torch.full((5,), 1 / 5),
        "constant": torch.full((5,), 1 / 10),
    }[aggregation].repeat_interleave(lens)
    advantages = torch.cat([torch.arange(count) - 1.5 for count in lens])
    plain = engine(peaked, rate=0.0)
    expected = plain.train_step(rows, lambda outputs, at: -(weight * advantages)[at] @ outputs[0]).grad_norm
    constant = 10.0 if aggregation == "constant" else None
    grpo = {"lossAggregation": aggregation, "lossConstant": constant, "kl": {"coefficient": 0}}
    for tokens, order, multiple in ((1000, [0, 1, 2, 3, 4], 1), (1, [3, 0, 4, 2, 1], 1), (30, [4, 3, 2, 1, 0], 4)):
        policy = PolicyWorker(with_policy(make_config(algorithm={"grpo": grpo}), peaked, learning_rate=0.0))
        policy.engine.micro_batch_tokens = tokens
        batch = experience(rows, policy, lambda count: torch.arange(count) - 1.5).select_rows(torch.tensor(order))
        metrics = policy.update(batch.pad_to_multiple(multiple)[0])
        assert metrics["grad_norm"] == pytest.approx(expected, rel=1e-4)
        assert metrics["policy_loss"] == pytest.approx(-(weight @ advantages).item(), rel=1e-4)


def test_a_kl_in_the_loss_pulls_towards_the_reference(make_config, peaked: Path) -> None:
    config = make_config(algorithm={"ppo": {"kl": {"coefficient": 1.0, "in": "loss", "estimator": "k2"}, "epochs": 8}})
    policy = PolicyWorker(with_policy(config, peaked))
    batch = experience(sequences(), policy, torch.zeros)
    target = ragged([row + 0.5 for row in batch.batch["old_log_probs"].unbind()])
    batch = batch.union(DataProto.from_dict({"ref_log_probs": target}))
    policy.update(batch)
    gap = target.values() - policy.compute_log_probs(batch).batch["old_log_probs"].values()
    assert gap.square().mean() < 0.25 * 0.8


def test_an_entropy_bonus_raises_the_entropy(make_config, peaked: Path) -> None:
    policy = PolicyWorker(with_policy(make_config(algorithm={"ppo": {"entropyCoefficient": 1.0, "epochs": 5}}), peaked))
    batch = experience(sequences(), policy, torch.zeros)
    policy.update(batch)
    after = policy.compute_log_probs(batch).batch["entropy"].values()
    assert after.mean() > batch.batch["entropy"].values().mean() + 0.01


def test_a_nan_fails_the_update_and_spares_the_weights(make_config, peaked: Path) -> None:
    policy = PolicyWorker(with_policy(make_config(), peaked))
    before = weights(policy.engine)
    batch = experience(sequences(), policy, torch.ones)
    batch.batch["advantages"].values()[3] = math.nan
    with pytest.raises(NumericalError, match=r"policy.*nan.*Fix:"):
        policy.update(batch)
    assert all(torch.equal(value, before[name]) for name, value in weights(policy.engine).items())
    policy.update(experience(sequences(), policy, torch.ones))
    assert all(torch.isfinite(value).all() for value in weights(policy.engine).values())


def test_a_reference_agrees_with_the_policy_that_it_started_from(make_config, peaked: Path) -> None:
    config = with_policy(make_config(rollout={"temperature": 0.7}), peaked)
    policy, reference = PolicyWorker(config), ReferenceWorker(config)
    batch = experience(sequences(), policy, torch.ones)
    scores = reference.compute_log_probs(batch).batch["ref_log_probs"]
    torch.testing.assert_close(scores.values(), batch.batch["old_log_probs"].values(), atol=1e-5, rtol=0)
    assert scores.offsets().tolist() == batch.batch["response_ids"].offsets().tolist()


def test_a_critic_starts_at_0_and_learns_its_targets(make_config, peaked: Path) -> None:
    config = make_config(algorithm={"ppo": {"valueClipRange": None, "epochs": 15}})
    critic = CriticWorker(with_policy(config, peaked, learning_rate=1e-2))
    rows = sequences()
    batch = DataProto.from_dict({"prompt_ids": ragged(rows.prompts), "response_ids": ragged(rows.responses)})
    targets = ragged([torch.linspace(-1, 1, len(response)) for response in rows.responses])
    batch = batch.union(critic.compute_values(batch)).union(DataProto.from_dict({"returns": targets}))
    assert not batch.batch["values"].values().any()
    first = critic.update(batch)
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)
    again = batch.select(["prompt_ids", "response_ids", "returns"])
    second = critic.update(again.union(critic.compute_values(again)))
    assert second["explained_variance"] > 0.5
    assert second["value_loss"] < first["value_loss"]


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "initializer_range": 2.0, "tie_word_embeddings": True}
    config["attn_logit_softcapping"] = None  # refused before
    gemma = materialize(ModelSource(random=RandomModel(architecture="gemma2", config=config)), tmp_path)
    with pytest.raises(InputError, match="got a gemma2 model, which changes its logits"):
        engine(gemma)


def test_a_gpu_without_enough_memory_is_told_with_what_to_lower(peaked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
        "free. Including non-PyTorch memory, this process has 77.85 GiB memory in use. See documentation for more."
    )
    trained, rows = engine(peaked, rate=0.1), sequences()
    wanted = "training: got CUDA out of memory (2.00 GiB more of a GPU of 79.10 GiB with 1.25 GiB free); expected what"
    for error in (torch.OutOfMemoryError(said), RuntimeError("CUDA error: out of memory")):
        monkeypatch.setattr(trained.module, "forward", Mock(side_effect=error))
        for act in (lambda: trained.score(rows), lambda: trained.train_step(rows, mean_loss(rows))):
            with pytest.raises(ResourceError, match=r"training: got .* lower training\.microBatchTokens") as caught:
                act()
            assert wanted in str(caught.value) or "got CUDA error: out of memory; expected" in str(caught.value)
    monkeypatch.setattr(trained.module, "forward", Mock(side_effect=RuntimeError("another")))
    with pytest.raises(RuntimeError, match="another"):
        trained.score(rows)
