"""The training loop driven in this process, where single parts can be switched off."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rlhf_api import RLHFJob, RuntimeConfig
from rlhf_operator.manifest import read_manifest
from rlhf_operator.plan import build_plan
from rlhf_runtime import trainer
from rlhf_runtime.preflight import preflight
from rlhf_runtime.report import Report, StepRecord, Summary
from rlhf_runtime.single_controller import LocalCluster
from rlhf_runtime.trainer import train
from rlhf_runtime.types import StepMetrics
from rlhf_runtime.weight_sync import SyncReport

QUICKSTART = Path(__file__).parents[2] / "examples" / "01-quickstart.yaml"


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None: ...

    def step(self, record: StepRecord) -> None:
        self.steps.append(record.metrics)

    def close(self, summary: Summary) -> None: ...


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., list[StepMetrics]]:
    """Train a changed quickstart, its policy so peaked that wrong log-probabilities show, and give its metrics."""

    def _fit(
        batch: int,
        steps: int,
        groups: list[dict] | None = None,
        temperature: float = 1.0,
        tensor_parallel: int = 1,
        algorithm: dict | None = None,
        samples: int = 1,
    ) -> list[StepMetrics]:
        document = read_manifest(QUICKSTART).model_dump(by_alias=True)
        spec = document["spec"]
        spec["models"]["policy"]["random"]["config"]["initializer_range"] = 0.4
        spec["rollout"] |= {
            "temperature": temperature,
            "tensorParallelSize": tensor_parallel,
            "samplesPerPrompt": samples,
        }
        spec["training"] |= {"steps": steps, "optimizer": {"learningRate": 1e-2}}
        spec["data"] |= {"batchSize": batch, "maxResponseLength": 8}
        spec["algorithm"]["ppo"]["miniBatchSize"] = None
        if algorithm:
            spec["algorithm"] = algorithm
            spec["models"]["critic"] = spec["training"]["criticOptimizer"] = None
        spec["placement"]["groups"] = groups or spec["placement"]["groups"]
        config = build_plan(RLHFJob.parse(document), str(tmp_path)).config
        kept = Kept()
        with LocalCluster(config.local_nodes):
            train(config, preflight(config), Report(config, [kept]))
        return kept.steps

    return _fit


TRAINED = ["policy", "critic", "reference", "reward"]


@pytest.mark.parametrize(
    ("groups", "tensor_parallel"),
    [
        ({"all": [*TRAINED, "rollout"]}, 1),
        ({"train": TRAINED, "rollout": ["rollout"]}, 2),
    ],
    ids=["two engines beside two ranks", "one engine of two devices, apart from two ranks"],
)
def test_ranks_and_engines_train_a_batch_that_they_cannot_share_evenly(fit, groups, tensor_parallel) -> None:
    placed = [{"name": name, "pool": "local", "roles": roles, "workers": 2} for name, roles in groups.items()]
    steps = fit(batch=7, steps=3, groups=placed, temperature=0.7, tensor_parallel=tensor_parallel)
    assert [line["weight_version"] for line in steps] == [1, 2, 3]
    assert all(line["rollout_log_prob_gap"] < 1e-4 for line in steps)
    assert all(line["ratio_max_deviation"] < 1e-4 for line in steps)
    assert steps[-1]["kl"] > 0


def test_without_the_sync_rollouts_drift_away_from_the_policy(fit, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(policy, rollout, version: int) -> SyncReport:
        rollout.pause()
        rollout.publish_weights(version)
        rollout.resume()
        return SyncReport(version, 0, 0.0)

    monkeypatch.setattr(trainer, "sync_weights", pretend)
    gaps = [line["rollout_log_prob_gap"] for line in fit(batch=8, steps=4)]
    assert gaps[0] < 1e-4
    assert gaps[1] > 10 * gaps[0]
    assert gaps[-1] > gaps[1]


def test_groups_are_sampled_until_all_have_signal_and_a_target_steers_the_kl(fit) -> None:
    """GRPO without a critic, with every part of the loop that PPO does not go through."""
    grpo = {
        "dynamicSampling": {"maxTries": 50},
        "overlong": {"buffer": 4},
        "kl": {"in": "reward", "estimator": "k1", "coefficient": 0.1, "adaptive": {"target": 100, "horizon": 12}},
    }
    groups = [{"name": "all", "pool": "local", "roles": ["policy", "reference", "rollout", "reward"], "workers": 2}]
    steps = fit(batch=5, steps=3, groups=groups, algorithm={"grpo": grpo}, samples=2)
    assert all(line["sampling_tries"] >= 1 for line in steps)
    assert max(line["sampling_tries"] for line in steps) > 1, "every group had signal at once"
    assert all(line["reward_std"] > 0 for line in steps)
    assert all(line["overlong_penalty"] <= 0 for line in steps)
    factor = 1 - 0.2 * 10 / 12  # far below the target
    assert [line["kl_coefficient"] for line in steps] == pytest.approx([0.1, 0.1 * factor, 0.1 * factor**2])
    assert not {"value_loss", "explained_variance", "time/value"}.intersection(steps[0])
