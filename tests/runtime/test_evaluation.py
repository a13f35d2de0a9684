"""Evaluation driven without Ray: the workers are stand-ins that say what they were asked."""

from typing import Any

import pytest
import torch
from rlhf_runtime.engines.vllm_engine import Response, Sampling
from rlhf_runtime.evaluation import Evaluator, evaluation_metrics
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.types import Prompt
from rlhf_runtime.workers.rollout import RolloutWorker

PROMPTS = [Prompt(0, "1+1=", [3, 4], {"answer": "2"}), Prompt(1, "12", [5, 6, 7], {"answer": "3"})]


class Answered:
    def __init__(self, result: DataProto) -> None:
        self._result = result

    def get(self) -> DataProto:
        return self._result


class Rollout:
    """Answers with as many tokens as the sample's number and one more."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []

    def evaluate(self, batch: DataProto, version: int) -> Answered:
        self.asked.append((batch, version))
        numbers = batch.batch["sample_index"].tolist()
        columns = {
            "response_ids": ragged([torch.full((number + 1,), number) for number in numbers]),
            "weight_version": torch.full((len(numbers),), version),
        }
        return Answered(DataProto.from_dict(columns, {"response": [f"r{number}" for number in numbers]}))


class Reward:
    """1 for each response to a row whose answer is 2."""

    def evaluate(self, batch: DataProto) -> Answered:
        assert sorted(batch.columns) == ["columns", "prompt", "response"]
        scores = torch.tensor([float(row["answer"] == "2") for row in batch.non_tensor_batch["columns"]])
        return Answered(DataProto.from_dict({"scores": 2 * scores, "reward/right": scores}))


@pytest.fixture
def evaluator(make_config):
    def _evaluator(steps: int = 7, **evaluation: Any) -> tuple[Evaluator, Rollout]:
        fields = {"prompts": {"inline": ["a", "b"]}, "everySteps": 3, "maxResponseLength": 8, **evaluation}
        config = make_config(data={"prompts": {"builtin": "arithmetic"}, "evaluation": fields})
        config = config.model_copy(update={"training": config.training.model_copy(update={"steps": steps})})
        rollout = Rollout()
        return Evaluator(config, PROMPTS, {"rollout": rollout, "reward": Reward()}), rollout

    return _evaluator


def test_it_is_due_at_the_start_every_few_steps_and_at_the_end(evaluator) -> None:
    own, _ = evaluator(steps=7)
    assert [step for step in range(8) if own.due(step)] == [0, 3, 6, 7]


def test_all_prompts_are_answered_and_scored(evaluator) -> None:
    own, rollout = evaluator(samplesPerPrompt=2, temperature=0.5)
    batch = own.run(version=4)
    assert batch.non_tensor_batch["prompt"].tolist() == ["1+1=", "1+1=", "12", "12"]
    assert batch.batch["scores"].tolist() == [2, 2, 0, 0]
    assert evaluation_metrics(batch, "eval") == {
        "eval/reward_mean": 1.0, "eval/reward/right": 0.5, "eval/response_length": 2.5,
    }  # fmt: skip
    (asked, version), *_ = rollout.asked
    assert version == 4
    assert asked.batch["sample_index"].tolist() == [0, 1, 2, 3]


def test_every_evaluation_asks_the_same(evaluator) -> None:
    """What differs between two of them is the weights alone, not the seeds, nor which engine answers."""
    own, rollout = evaluator()
    own.run(version=0)
    own.run(version=3)
    (first, _), (second, _) = rollout.asked
    assert sorted(first.columns) == ["expected_tokens", "prompt_ids", "prompt_index", "sample_index"]
    for name in ("expected_tokens", "sample_index"):
        assert first.batch[name].tolist() == second.batch[name].tolist()


# ------------------------------------------------------------------------------------------------------------ engine


class Engine:
    """Remembers what was to be generated and forgotten."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def generate(self, prompts: list, seeds: list[int], sampling: Sampling, version: int) -> list[Response]:
        self.calls.append((seeds, sampling, version))
        return [Response([2], [-0.5]) for _ in prompts]

    def forget(self) -> None:
        self.calls.append("forget")


@pytest.fixture
def worker(make_config, monkeypatch: pytest.MonkeyPatch) -> tuple[RolloutWorker, Engine]:
    """A rollout worker on a stand-in for vLLM."""
    engine = Engine()
    monkeypatch.setattr("rlhf_runtime.workers.rollout.VLLMEngine", lambda folder, settings: engine)
    evaluation = {"prompts": {"inline": ["a"]}, "maxResponseLength": 5, "temperature": 0.5, "topP": 0.9}
    data = {"prompts": {"builtin": "arithmetic"}, "evaluation": evaluation}
    return RolloutWorker(make_config(data=data)), engine


def asked() -> DataProto:
    return DataProto.from_dict({"prompt_ids": ragged([torch.tensor([2, 3])] * 2), "sample_index": torch.arange(2)})


def test_an_evaluation_is_sampled_in_its_own_way_and_leaves_nothing_in_the_engine(worker) -> None:
    rollout, engine = worker
    rollout.evaluate(asked(), version=1)
    (_, sampling, version), forgotten = engine.calls
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, version) == (0.5, 0.9, 5, 1)
    assert forgotten == "forget"
    rollout.generate(asked(), version=1)
    (_, sampling, _) = engine.calls[-1]
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 1.0, 256)


def test_seeds_of_an_evaluation_are_its_own_and_the_same_for_every_version(worker) -> None:
    rollout, engine = worker
    for version in (0, 7):
        rollout.evaluate(asked(), version)
    rollout.generate(asked(), 7)
    (first, *_), _, (second, *_), _, (training, *_) = engine.calls
    assert first == second
    assert len({*first, *training}) == 4
