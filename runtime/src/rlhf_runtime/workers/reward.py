"""The reward role: calls the job's reward functions and models, and adds up their scores."""

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from rlhf_api import RuntimeConfig

from rlhf_runtime.checkpoint import randomness
from rlhf_runtime.errors import RewardError
from rlhf_runtime.protocol import VALID, DataProto
from rlhf_runtime.rewards import model_path
from rlhf_runtime.rewards.function import RewardTerm, extend_path, resolve
from rlhf_runtime.single_controller.decorator import Dispatch, register
from rlhf_runtime.workers.saved import SavedWorker

if TYPE_CHECKING:
    from rlhf_runtime.rewards.model import ModelTerm


class RewardWorker(SavedWorker):
    """Scores responses with the job's reward functions and models, found once; models compute on the group's device.

    Raises:
        InputError: when a function cannot be found or imported here, or a model cannot be loaded.
    """

    role = "reward"
    needs_process_group: ClassVar[bool] = False

    def __init__(self, config: RuntimeConfig) -> None:
        extend_path(config.python_path)
        self._terms = [self._term(index, config) for index in range(len(config.rewards))]

    def _term(self, index: int, config: RuntimeConfig) -> "RewardTerm | ModelTerm":
        reward = config.rewards[index]
        if reward.model is None:
            return resolve(reward)
        from rlhf_runtime.rewards.model import ModelTerm  # transformers, which functions do without

        return ModelTerm(reward, model_path(index), self.device, config.training.micro_batch_tokens)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        """Score each response; rows that only pad the batch are kept from the terms and get 0.

        Args:
            batch: non-tensors `prompt`, `response` ([B] str) and `columns` ([B] dict).

        Returns:
            `scores` [B] float32, the weighted sum, and the unweighted `reward/<name>` [B] float32 of each term.

        Raises:
            RewardError: when a term does not come to one finite number a response.
        """
        valid = batch.batch[VALID].numpy() if VALID in batch.columns else np.ones(len(batch), dtype=bool)  # [B]
        prompts, responses, columns = (batch.non_tensor_batch[key][valid] for key in ("prompt", "response", "columns"))
        total = np.zeros(len(batch))
        tensors = {}
        for term in self._terms:
            scores = np.zeros(len(batch), dtype=np.float32)
            if valid.any():
                scores[valid] = term.score(prompts, responses, columns)
            total += term.weight * scores.astype(np.float64)
            tensors[f"reward/{term.name}"] = torch.from_numpy(scores)
        tensors["scores"] = torch.from_numpy(total).float()
        if not tensors["scores"].isfinite().all():
            names, worst = ", ".join(term.name for term in self._terms), total[np.abs(total).argmax()]
            raise RewardError(
                f"rewards ({names}): got a weighted sum of {worst:.3g}; expected a number that float32 can hold. "
                f"Fix: lower the weights, or the scores that the functions return"
            )
        return DataProto.from_dict(tensors)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def evaluate(self, batch: DataProto) -> DataProto:
        """`score` of responses to held-out prompts; functions that draw numbers go on as if it had not been called."""
        generators = randomness.capture()
        try:
            return self.score(batch)
        finally:
            randomness.restore(generators)
