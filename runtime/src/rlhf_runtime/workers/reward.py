"""The reward role: calls the job's reward functions and adds up their scores."""

from typing import ClassVar

import numpy as np
import torch
from rlhf_api import RuntimeConfig

from rlhf_runtime.errors import RewardError
from rlhf_runtime.protocol import VALID, DataProto
from rlhf_runtime.rewards.function import extend_path, resolve
from rlhf_runtime.single_controller.decorator import Dispatch, register
from rlhf_runtime.single_controller.worker import Worker


class RewardWorker(Worker):
    """Scores responses with the job's reward functions, found once.

    Raises:
        InputError: when a function cannot be found or imported here.
    """

    needs_process_group: ClassVar[bool] = False

    def __init__(self, config: RuntimeConfig) -> None:
        extend_path(config.python_path)
        self._terms = [resolve(reward) for reward in config.rewards]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, batch: DataProto) -> DataProto:
        """Score each response; rows that only pad the batch are kept from the functions and get 0.

        Args:
            batch: non-tensors `prompt`, `response` ([B] str) and `columns` ([B] dict).

        Returns:
            `scores` [B] float32, the weighted sum, and the unweighted `reward/<name>` [B] float32 of each term.

        Raises:
            RewardError: when a function raises or returns something that is not one finite number a response.
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
