"""Weight sync into a real vLLM engine of two workers; a module of its own, so that few engines are there at a time."""

from typing import Any

import pytest
from rlhf_runtime.engines.vllm_engine import Sampling


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_every_worker_of_a_tensor_parallel_engine_gets_the_weights(
    spread: Any, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    spread.prepare(transport, tied=False)
    spread.load(1)
    before = spread.greedy()
    # Both workers fail, and their answers to later calls are still told apart.
    spread.sync(spread.wrong("engine fails", times=1))
    assert "layers.9" in caplog.text
    sampling = Sampling(temperature=0.7, max_tokens=16, stop_token_ids=(1,))
    for prompt, (tokens, log_probs) in zip(
        spread.PROMPTS, spread.rollout.sample(spread.PROMPTS, sampling, spread.version)[0], strict=True
    ):
        assert log_probs == pytest.approx(spread.trainer.log_probs(prompt, tokens, 0.7)[0], abs=1e-4)
    assert [len(records) for records in spread.rollout.received_weights()] == [2]
    assert before != spread.greedy()
