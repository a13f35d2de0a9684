"""Why an engine could not start, as its user is told. vLLM's own entry point is a stand-in that fails."""

from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from rlhf_runtime.engines import vllm_engine
from rlhf_runtime.engines.vllm_engine import ENVIRONMENT, EngineSettings, VLLMEngine
from rlhf_runtime.errors import InputError

SETTINGS = EngineSettings("cuda", "nccl", 16, 1, 0.9, tensor_parallel_size=2)
FAILED = Exception("WorkerProc initialization failed due to an exception in a background process. See stack trace")
TRACEBACK = """\
(Worker_TP1 pid=70) ERROR 12-01 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker_TP1 pid=70) ERROR 12-01 [multiproc_executor.py:953]     raise RuntimeError("ValueError: not this")
(Worker_TP1 pid=70) ERROR 12-01 [multiproc_executor.py:953] torch.OutOfMemoryError: CUDA out of memory. Tried all.
(Worker_TP0 pid=69) ERROR 12-01 [multiproc_executor.py:953] RuntimeError: the other is gone
"""

Start = Callable[[Exception, str], str]


@pytest.fixture
def start(make_peaked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine that fails like this once its processes have written that; what is told of it."""
    output = tmp_path / "worker.out"
    output.write_text("OldError: of a run before\n")
    monkeypatch.setattr(vllm_engine, "STDOUT", output)
    for name in (*ENVIRONMENT, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "set back at the end")
    folder = make_peaked()

    def run(error: Exception, written: str) -> str:
        def fail(*_: object, **__: object) -> None:
            with output.open("a") as out:
                out.write(written)
            raise error

        monkeypatch.setattr(vllm, "LLM", fail)
        with pytest.raises(InputError) as caught:
            VLLMEngine(folder, SETTINGS)
        assert caught.value.__cause__ is error
        return str(caught.value).replace(str(output), "worker.out").replace(str(folder), "folder")

    return run


def test_a_failed_process_of_an_engine_is_told_by_what_it_wrote(start: Start) -> None:
    reason = "torch.OutOfMemoryError: CUDA out of memory. Tried all.; more in worker.out"
    told = start(FAILED, TRACEBACK)
    assert told.startswith(f"models.policy: got folder, which vLLM refuses ({reason}); expected a model and a KV cache")
    assert "Fix: choose another model, change rollout.gpuMemoryUtilization or rollout.tensorParallelSize, or " in told
    assert "refuses (a process of the engine failed; more in worker.out)" in start(FAILED, "nothing of use\n")


def test_a_gpu_without_memory_for_the_engine_is_told(start: Start) -> None:
    told = start(RuntimeError("CUDA out of memory occurred when warming up sampler"), "")
    assert told.startswith("rollout.gpuMemoryUtilization: got CUDA out of memory occurred when warming up sampler; exp")
    assert "refuses (no room for a KV cache); expected" in start(ValueError("no room for a KV cache"), "")
