"""The rollout role: prompts in, responses with their log-probabilities out."""

import hashlib
from typing import Any, ClassVar

import torch
from rlhf_api.data import Evaluation
from rlhf_api.runtime_config import RuntimeConfig

from rlhf_runtime.balancing import BALANCED
from rlhf_runtime.engines.vllm_engine import EngineSettings, Sampling, VLLMEngine
from rlhf_runtime.models import load_tokenizer, model_folder, stop_token_ids
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.single_controller.decorator import Dispatch, register
from rlhf_runtime.single_controller.worker import Worker
from rlhf_runtime.weight_sync.client import raise_failure
from rlhf_runtime.weight_sync.verify import ReceivedWeights

HELD_OUT = -1
"""Stands for the version in the seeds of evaluation; no weights have it."""


class RolloutWorker(Worker):
    """One vLLM engine.

    The policy's first rank calls `transfer_weights`, not the driver.
    """

    needs_process_group: ClassVar[bool] = False
    env_allow_list: ClassVar[tuple[str, ...]] = (*Worker.env_allow_list, "VLLM_*")

    def __init__(self, config: RuntimeConfig) -> None:
        """Start the engine on the policy's first weights.

        Raises:
            InputError: when vLLM cannot run the model on the device.
        """
        folder = model_folder(config, "policy")
        self._tokenizer = load_tokenizer(folder)
        self._seed = config.seed
        stops = stop_token_ids(folder, self._tokenizer)
        self._sampling = Sampling(config.rollout.temperature, config.data.max_response_length, stops)
        self._held_out = _sampling_of(config.data.evaluation, stops) if config.data.evaluation else None
        self._engine = VLLMEngine(folder, EngineSettings.of(config))

    @register(BALANCED, blocking=False)
    def generate(self, batch: DataProto, version: int) -> DataProto:
        """One response a row.

        Args:
            batch: `prompt_ids` ragged [B, P*] int64 and `sample_index` [B] int64, which tells samples of a step apart:
                what is drawn for a row depends on it, the job's seed and the version, not on the engine.
            version: The version of the weights that the trainer allows.

        Returns:
            `response_ids` ragged [B, R*] int64, `rollout_log_probs` ragged [B, R*] float32, `weight_version` [B] int64
            and the non-tensor `response` [B] str.

        Raises:
            WeightSyncError: when the engine is paused or holds another version.
        """
        return self._respond(batch, self._sampling, version, seed_version=version)

    @register(BALANCED, blocking=False)
    def evaluate(self, batch: DataProto, version: int) -> DataProto:
        """One response a row to held-out prompts, sampled as `data.evaluation` says.

        What is drawn for a row depends on its `sample_index` and the job's seed alone, so that versions compare.
        Nothing of it is left in the engine. Arguments, result and errors are those of `generate`.
        """
        assert self._held_out is not None, "a job without evaluation"
        answered = self._respond(batch, self._held_out, version, seed_version=HELD_OUT)
        self._engine.forget()
        return answered

    def _respond(self, batch: DataProto, sampling: Sampling, version: int, seed_version: int) -> DataProto:
        prompts = [row.tolist() for row in batch.batch["prompt_ids"].unbind()]
        seeds = [sample_seed(self._seed, seed_version, index) for index in batch.batch["sample_index"].tolist()]
        responses = self._engine.generate(prompts, seeds, sampling, version)
        texts = self._tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        return DataProto.from_dict(
            {
                "response_ids": ragged([torch.tensor(r.token_ids, dtype=torch.int64) for r in responses]),
                "rollout_log_probs": ragged([torch.tensor(r.log_probs, dtype=torch.float32) for r in responses]),
                "weight_version": torch.full((len(responses),), version, dtype=torch.int64),
            },
            {"response": texts},
        )

    @register(Dispatch.ONE_TO_ALL)
    def pause(self) -> None:
        """Refuse to generate until `resume`."""
        self._engine.pause()

    @register(Dispatch.ONE_TO_ALL)
    def resume(self) -> None:
        """Generate again."""
        self._engine.resume()

    @register(Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int) -> None:
        """Name the weights that arrived, and forget what was computed with older ones.

        Raises:
            WeightSyncError: when the prefix cache cannot be reset.
        """
        self._engine.publish(version)

    @register(Dispatch.ONE_TO_ALL)
    def received_weights(self) -> list[ReceivedWeights]:
        """The record of the last update, one a worker of the engine."""
        return self._engine.received_weights()

    def transfer_weights(self, step: str, info: dict[str, Any] | None) -> None:
        """One step of vLLM's weight transfer, on every worker of the engine.

        Args:
            step: The method of vLLM's worker, such as `start_weight_update`.
            info: Its argument, if it takes one.

        Raises:
            WeightSyncError: when a worker failed in it.
        """
        raise_failure(self._engine.llm.collective_rpc("attempt_transfer", args=(step, info)))


def _sampling_of(evaluation: Evaluation, stops: tuple[int, ...]) -> Sampling:
    assert evaluation.max_response_length is not None, "a default that the planner derives"
    return Sampling(evaluation.temperature, evaluation.max_response_length, stops, evaluation.top_p)


def sample_seed(seed: int, version: int, sample_index: int) -> int:
    """The seed of one sample: 63 bits that no other sample, step or job of another seed shares, but by accident."""
    digest = hashlib.blake2b(f"{seed}/{version}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
