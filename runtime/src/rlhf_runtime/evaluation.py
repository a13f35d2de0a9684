"""How the policy answers held-out prompts.

    prompts ─ evaluate ─ evaluate ─ metrics and samples
              rollout    reward

Training goes on as if nobody had looked: the order of prompts and the seeds of samples, what is known of response
lengths, the engines' caches and the reward functions' random generators are as they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api import RuntimeConfig

from rlhf_runtime.balancing import ResponseLengths
from rlhf_runtime.data import make_batch
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import lengths
from rlhf_runtime.report import Sample
from rlhf_runtime.single_controller.calls import Span
from rlhf_runtime.types import Prompt, StepMetrics
from rlhf_runtime.worker_groups import RoleGroups

BEFORE = "eval/start"
"""What the metrics of the evaluation before the first step begin with, in the line of that step."""
AFTER = "eval"
"""What those of an evaluation after a step begin with, in that step's line."""


@dataclass(frozen=True)
class Look:
    """What an evaluation came to."""

    metrics: StepMetrics
    """Its part of a line of `metrics.jsonl`."""
    samples: list[Sample]
    """Some of the responses."""
    spans: list[Span]
    """Which worker worked on what, and when."""


class Evaluator:
    """Asks the rollout and reward workers about held-out prompts.

    Args:
        config: A job with `data.evaluation`.
        prompts: Its held-out prompts.
        roles: The workers.
    """

    def __init__(self, config: RuntimeConfig, prompts: Sequence[Prompt], roles: RoleGroups) -> None:
        evaluation = config.data.evaluation
        assert evaluation is not None, "a job without evaluation"
        assert evaluation.max_response_length is not None, "a default that the planner derives"
        self._every, self._last = evaluation.every_steps, config.training.steps
        self._roles = roles
        self._batch = make_batch(prompts, evaluation.samples_per_prompt)
        self._asked = self._batch.select(["prompt_ids", "sample_index"]).union(
            ResponseLengths(evaluation.max_response_length).forecast(self._batch)
        )

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after this step; 0 is before the first."""
        return step % self._every == 0 or step == self._last

    def run(self, version: int) -> DataProto:
        """The responses of the policy's current version to all held-out prompts, scored.

        Returns:
            `response_ids` (ragged [B, R*]), `weight_version`, `scores` and `reward/<name>` ([B]), and the non-tensors
            `prompt` and `response` ([B] str).
        """
        answers = self._roles["rollout"].evaluate(self._asked, version).get()
        answered = self._batch.select(["prompt", "columns"]).union(answers)
        scores = self._roles["reward"].evaluate(answered.select(["prompt", "response", "columns"])).get()
        return answered.union(scores)


def evaluation_metrics(batch: DataProto, prefix: str) -> StepMetrics:
    """Means over all held-out responses.

    Args:
        batch: As `Evaluator.run` gives it.
        prefix: What the names begin with.
    """
    columns = batch.batch
    rewards = {name: column for name, column in columns.items() if name.startswith("reward/")}
    means = {"reward_mean": columns["scores"], **rewards, "response_length": lengths(columns["response_ids"]).float()}
    return {f"{prefix}/{name}": column.mean().item() for name, column in means.items()}
