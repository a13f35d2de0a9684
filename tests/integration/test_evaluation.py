"""Evaluation and a reward model in real runs: what they tell, and that training does not notice them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from rlhf_api import RLHFJob, RuntimeConfig
from rlhf_api.checkpoint import CHECKPOINT_FOLDERS
from rlhf_operator.manifest import read_manifest
from rlhf_operator.plan import build_plan
from rlhf_runtime.models import ascii_tokenizer
from rlhf_runtime.preflight import preflight
from rlhf_runtime.report import Report, StepRecord, Summary
from rlhf_runtime.single_controller import LocalCluster
from rlhf_runtime.trainer import train
from rlhf_runtime.types import StepMetrics
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

QUICKSTART = Path(__file__).parents[2] / "examples" / "01-quickstart.yaml"
STEPS = 3
EVALUATION = {
    "prompts": {"inline": [{"prompt": "8+9=", "answer": "17"}, {"prompt": "1+1=", "answer": "2"}]},
    "everySteps": 2,
    "samplesPerPrompt": 3,
    "temperature": 0.5,
    "topP": 0.9,
    "maxResponseLength": 12,
}


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None: ...

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def close(self, summary: Summary) -> None: ...


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of random weights."""
    folder, tokenizer = tmp_path_factory.mktemp("judge"), ascii_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "initializer_range": 0.4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", num_key_value_heads=1, num_labels=1, **sizes, **tokens)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The run folders of `runs`."""
    return {asked: tmp_path_factory.mktemp("run") for asked in (False, True)}


@pytest.fixture(scope="module")
def runs(reward_model: Path, folders: dict[bool, Path]) -> dict[bool, list[StepRecord]]:
    """The records of one short job, without evaluation and with it."""

    def run(folder: Path, evaluation: dict | None) -> list[StepRecord]:
        document = read_manifest(QUICKSTART).model_dump(by_alias=True)
        spec = document["spec"]
        spec["training"] |= {"steps": STEPS, "optimizer": {"learningRate": 1e-2}}
        spec["data"] |= {"batchSize": 6, "maxResponseLength": 8, "evaluation": evaluation}
        spec["algorithm"]["ppo"]["miniBatchSize"] = None
        spec["rewards"].append({"name": "judge", "weight": 0.5, "model": {"path": str(reward_model)}})
        spec["checkpoint"] = {"everySteps": STEPS}
        config = build_plan(RLHFJob.parse(document), str(folder)).config
        kept = Kept()
        with LocalCluster(config.local_nodes):
            train(config, preflight(config), Report(config, [kept]))
        return kept.steps

    return {asked: run(folder, EVALUATION if asked else None) for asked, folder in folders.items()}


def test_training_is_the_same_bit_for_bit_with_and_without_evaluation(runs: dict[bool, list[StepRecord]]) -> None:
    def trained(record: StepRecord) -> StepMetrics:
        unlike = ("time/", "eval/", "tokens_per_second", "object_store_bytes")
        return {name: value for name, value in record.metrics.items() if not name.startswith(unlike)}

    without, evaluated = runs[False], runs[True]
    assert [trained(record) for record in evaluated] == [trained(record) for record in without]
    assert [record.samples for record in evaluated] == [record.samples for record in without]
    assert not any(name.startswith("eval/") for record in without for name in record.metrics)


def test_what_a_resumed_run_goes_on_from_is_the_same_bit_for_bit(
    runs: dict[bool, list[StepRecord]], folders: dict[bool, Path]
) -> None:
    def state(folder: Path) -> tuple[str, dict[str, torch.Tensor]]:
        """What the last checkpoint holds of driver, policy and critic."""
        [checkpoint] = (folder / "checkpoints").glob(CHECKPOINT_FOLDERS)
        [policy], [critic] = (checkpoint.glob(f"{role}-*.safetensors") for role in ("policy", "critic"))
        tensors = {f"{file.name}: {name}": x for file in (policy, critic) for name, x in load_file(file).items()}
        return (checkpoint / "driver.json").read_text(), tensors

    (driver, tensors), (evaluated_driver, evaluated_tensors) = (state(folders[asked]) for asked in (False, True))
    assert evaluated_driver == driver
    assert evaluated_tensors.keys() == tensors.keys()
    assert [name for name, tensor in tensors.items() if not tensor.equal(evaluated_tensors[name])] == []


def test_the_policy_is_evaluated_before_the_first_step_every_second_and_after_the_last(
    runs: dict[bool, list[StepRecord]],
) -> None:
    first, second, third = runs[True]
    assert "eval/start/reward_mean" in first.metrics
    assert "eval/reward_mean" not in first.metrics
    for record, prefix, version in ((first, "eval/start", 0), (second, "eval", 2), (third, "eval", 3)):
        names = ("reward_mean", "reward/judge", "response_length")
        assert all(f"{prefix}/{name}" in record.metrics for name in names)
        assert record.metrics[f"time/{prefix}"] > 0
        assert 1 <= record.metrics[f"{prefix}/response_length"] <= 12
        assert {sample.weight_version for sample in record.held_out} == {version}
    assert any(span.method == "evaluate" for span in first.spans)


def test_a_reward_model_is_a_term_of_the_reward(runs: dict[bool, list[StepRecord]]) -> None:
    for record in runs[True]:
        metrics = record.metrics
        [function] = [name for name in metrics if name.startswith("reward/") and name != "reward/judge"]
        total = metrics[function] + 0.5 * metrics["reward/judge"]
        assert metrics["reward_mean"] == pytest.approx(total, abs=1e-5)
        assert metrics["reward/judge"] != 0
