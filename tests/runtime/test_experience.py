"""The driver's arithmetic: from scored rollouts to advantages, for every algorithm."""

import math

import pytest
import torch
from rlhf_runtime.algorithms.kl import kl_divergence
from rlhf_runtime.dynamic_sampling import fill_batch
from rlhf_runtime.errors import NumericalError, RewardError
from rlhf_runtime.experience import add_advantages, scored_by_update, step_metrics
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.weight_sync import SyncReport

LENGTHS = [3, 1, 4, 2]
SCORES = [1.0, 0.0, 0.5, 0.5]
SAMPLES = 2


@pytest.fixture
def configured(make_config):
    """A job of two samples a prompt whose algorithm has these constants."""

    def _configured(name, **settings):
        data = {"prompts": {"builtin": "arithmetic"}, "maxPromptLength": 8, "maxResponseLength": 4, "batchSize": 2}
        return make_config(algorithm={name: settings}, rollout={"samplesPerPrompt": SAMPLES}, data=data)

    return _configured


def experience(values: bool = True, reference: bool = True) -> DataProto:
    draw = torch.Generator().manual_seed(0)
    column = lambda: ragged([torch.randn(count, generator=draw) for count in LENGTHS])  # noqa: E731
    tensors = {
        "response_ids": ragged([torch.zeros(count, dtype=torch.int64) for count in LENGTHS]),
        "sample_index": torch.arange(len(LENGTHS)),
        "scores": torch.tensor(SCORES),
        "old_log_probs": column(),
        "entropy": column(),
    }
    tensors["rollout_log_probs"] = tensors["old_log_probs"]
    tensors |= {"ref_log_probs": column()} if reference else {}
    tensors |= {"values": column()} if values else {}
    return DataProto.from_dict(tensors)


def advantages(batch: DataProto, config, coefficient: float = 0.0) -> list[list[float]]:
    column = add_advantages(batch, config, coefficient).batch["advantages"]
    return [row.tolist() for row in column.unbind()]


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def whole(values: list[float]) -> list[list[float]]:
    """One value a row, at each of its tokens."""
    return [[value] * count for value, count in zip(values, LENGTHS, strict=True)]


def test_grpo_gives_every_token_the_advantage_of_its_response(configured) -> None:
    got = advantages(experience(), configured("grpo", normalizeByStd=False))
    assert flat(got) == pytest.approx(flat(whole([0.5, -0.5, 0, 0])))
    normalized = advantages(experience(), configured("grpo"))
    assert flat(normalized) == pytest.approx(flat(whole([math.sqrt(0.5), -math.sqrt(0.5), 0, 0])), rel=1e-4)


def test_rloo_compares_with_the_others(configured) -> None:
    got = advantages(experience(values=False, reference=False), configured("rloo", kl={"coefficient": 0}))
    assert flat(got) == pytest.approx(flat(whole([1, -1, 0, 0])))


def test_groups_are_those_of_a_sampling_not_of_a_prompt(configured) -> None:
    """The last prompt of an epoch may be the first of the next one too."""
    batch = experience().union(DataProto.from_dict({"prompt_index": torch.zeros(4, dtype=torch.int64)}))
    got = advantages(batch, configured("rloo"))
    assert flat(got) == pytest.approx(flat(whole([1, -1, 0, 0])))


def test_advantages_do_not_depend_on_the_order_of_rows(configured) -> None:
    order = torch.tensor([2, 0, 3, 1])
    for name in ("grpo", "rloo", "reinforcePlusPlus", "ppo"):
        config = configured(name, kl={"in": "reward", "estimator": "k1"})
        straight, mixed = (advantages(batch, config, 0.1) for batch in (experience(), experience().select_rows(order)))
        assert flat(mixed) == pytest.approx(flat([straight[row] for row in order.tolist()]), abs=1e-6), name


@pytest.mark.parametrize("baseline", [True, False])
def test_reinforce_plus_plus_sums_what_follows(configured, baseline: bool) -> None:
    batch = experience(values=False)
    got = advantages(batch, configured("reinforcePlusPlus", baseline=baseline, whiten=False), 0.1)
    outcomes = [0.5, -0.5, 0, 0] if baseline else SCORES
    old, ref = (batch.batch[name].unbind() for name in ("old_log_probs", "ref_log_probs"))
    for row, outcome in enumerate(outcomes):
        penalties = [-0.1 * (o - r) for o, r in zip(old[row].tolist(), ref[row].tolist(), strict=True)]
        expected = [sum(penalties[place:]) + outcome for place in range(LENGTHS[row])]
        assert got[row] == pytest.approx(expected, abs=1e-6)


def test_a_kl_in_the_reward_lowers_the_outcome_of_a_group(configured) -> None:
    batch = experience()
    got = advantages(batch, configured("rloo", kl={"estimator": "k3"}), 0.1)
    kl = kl_divergence(batch.batch["old_log_probs"].values(), batch.batch["ref_log_probs"].values(), "k3")
    rewards = [score - 0.1 * part.sum().item() for score, part in zip(SCORES, kl.split(LENGTHS), strict=True)]
    expected = [rewards[row] - rewards[row ^ 1] for row in range(4)]
    assert flat(got) == pytest.approx(flat(whole(expected)), abs=1e-6)


def test_a_kl_in_the_loss_leaves_the_advantages_alone(configured) -> None:
    kl = {"in": "loss", "estimator": "k2", "coefficient": 0.1}
    assert advantages(experience(), configured("grpo", kl=kl), 0.1) == advantages(experience(), configured("grpo"))


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "reinforcePlusPlus"])
def test_whitened_advantages_have_mean_0_and_variance_1(configured, name: str) -> None:
    got = torch.tensor(flat(advantages(experience(), configured(name, whiten=True))))
    assert got.mean().item() == pytest.approx(0, abs=1e-6)
    assert got.std(correction=0).item() == pytest.approx(1, abs=1e-3)


def test_returns_are_there_with_a_critic_alone(configured) -> None:
    assert "returns" in add_advantages(experience(), configured("ppo"), 0.0).columns
    assert "returns" not in add_advantages(experience(), configured("grpo"), 0.0).columns


def test_an_overlong_response_loses_and_is_told(configured) -> None:
    config = configured("grpo", normalizeByStd=False, overlong={"buffer": 2, "penalty": 0.5})
    batch = add_advantages(experience(), config, 0.0)
    rewards = [1 - 0.25, 0, 0.5 - 0.5, 0.5]
    expected = [(rewards[row] - rewards[row ^ 1]) / 2 for row in range(4)]
    assert batch.batch["advantages"].values().tolist() == pytest.approx(flat(whole(expected)))
    line = metrics(batch, config)
    assert line["overlong_penalty"] == pytest.approx(-0.75 / 4)
    assert line["reward_mean"] == pytest.approx(0.5)


def metrics(batch: DataProto, config) -> dict:
    return step_metrics(1, batch, config, {}, SyncReport(1, 0, 0.0), {"step": 1.0}, 0)


def test_the_kl_is_measured_by_k3_whatever_is_punished(configured) -> None:
    batch = experience()
    values = [batch.batch[name].values() for name in ("old_log_probs", "ref_log_probs")]
    for estimator in ("k1", "k3"):
        line = metrics(batch, configured("rloo", kl={"estimator": estimator}))
        assert line["kl"] == pytest.approx(kl_divergence(*values, "k3").mean().item())
    assert "kl" not in metrics(experience(reference=False), configured("rloo", kl={"coefficient": 0}))


def test_the_share_of_samples_with_signal_is_told_where_samples_are_compared(configured) -> None:
    assert metrics(experience(), configured("grpo"))["signal_share"] == 0.5
    assert "signal_share" not in metrics(experience(), configured("ppo"))


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "reinforcePlusPlus"])
@pytest.mark.parametrize("column", ["scores", "ref_log_probs"])
def test_a_nan_is_told_by_its_column(configured, name: str, column: str) -> None:
    batch = experience()
    broken = batch.batch[column]
    (broken.values() if broken.is_nested else broken)[1] = math.nan
    config = configured(name, kl={"in": "reward", "estimator": "k1"})
    with pytest.raises(NumericalError, match=rf"advantages: got a NaN or Inf in {column}; .* Fix:"):
        add_advantages(batch, config, 0.1)


# ---- dynamic sampling


def tries(*scores: list[float]):
    """A sampler of two prompts with two samples each, whose tries score these."""

    def sample(number: int) -> DataProto:
        index = torch.arange(4) + 4 * number
        return DataProto.from_dict({"sample_index": index, "scores": torch.tensor(scores[number])})

    return sample


def test_groups_without_signal_are_replaced() -> None:
    batch, count = fill_batch(tries([1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 1]), 2, 2, max_tries=5)
    assert count == 3
    assert batch.batch["sample_index"].tolist() == [2, 3, 8, 9]


def test_a_full_batch_is_taken_at_once() -> None:
    batch, count = fill_batch(tries([1, 0, 0, 1]), 2, 2, max_tries=2)
    assert (count, batch.batch["sample_index"].tolist()) == (1, [0, 1, 2, 3])


def test_no_signal_ends_after_so_many_tries_with_the_count() -> None:
    with pytest.raises(RewardError, match=r"got 1 prompts .* of 3 tries of 2; expected 2\. Fix: "):
        fill_batch(tries([1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]), 2, 2, max_tries=3)


@pytest.mark.parametrize(
    ("algorithm", "right"),
    [
        ({"grpo": {}}, True),
        ({"grpo": {"miniBatchSize": 16}}, True),
        ({"grpo": {"miniBatchSize": 15}}, False),
        ({"grpo": {"epochs": 2}}, False),
        ({"rloo": {}}, False),
        ({"rloo": {"kl": {"coefficient": 0}}}, True),
        ({"ppo": {"epochs": 1, "kl": {"in": "loss", "estimator": "k3"}}}, True),
    ],
    ids=str,
)
def test_an_update_scores_the_batch_where_nothing_needs_that_before(make_config, algorithm, right: bool) -> None:
    data = {"prompts": {"builtin": "arithmetic"}, "batchSize": 4}
    assert scored_by_update(make_config(algorithm=algorithm, data=data, rollout={"samplesPerPrompt": 4})) is right
