"""Batches of groups with signal alone, as DAPO samples them."""

from collections.abc import Callable

from rlhf_runtime.algorithms.groups import groups_with_signal
from rlhf_runtime.errors import RewardError
from rlhf_runtime.protocol import DataProto


def fill_batch(
    sample: Callable[[int], DataProto], prompts: int, samples_per_prompt: int, max_tries: int
) -> tuple[DataProto, int]:
    """Sample until there are enough groups whose rewards differ, and drop the others.

    Source: Yu et al., "DAPO", arXiv:2503.14476, section 3.2.

    Args:
        sample: Given the number of a try, from 0, responses to `prompts` further prompts with their `scores` [B] and a
            `sample_index` [B] that no other try has; the samples of a prompt stand in adjacent rows.
        prompts: Groups to fill the batch with, and prompts of a try.
        samples_per_prompt: Rows of a group.
        max_tries: When to give up.

    Returns:
        prompts * samples_per_prompt rows in the order in which they were sampled, and the tries that it took.

    Raises:
        RewardError: when the tries were not enough.
    """
    parts: list[DataProto] = []
    rows = prompts * samples_per_prompt
    for number in range(max_tries):
        batch = sample(number)
        groups = batch.batch["sample_index"] // samples_per_prompt
        parts.append(batch.select_rows(groups_with_signal(batch.batch["scores"], groups)))
        if sum(map(len, parts)) >= rows:
            return DataProto.concat(parts).unpad(sum(map(len, parts)) - rows), number + 1
    found = sum(map(len, parts)) // samples_per_prompt
    raise RewardError(
        f"algorithm.grpo.dynamicSampling: got {found} prompts whose samples' rewards differ, of {max_tries} tries of "
        f"{prompts}; expected {prompts}. Fix: choose prompts that the policy answers well now and then, raise "
        f"`maxTries` or rollout.samplesPerPrompt, or remove dynamicSampling"
    )
