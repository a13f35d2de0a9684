"""Why an engine could not start, as its user is told. vLLM's own entry point is a stand-in that fails."""

from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from rlhf_runtime.engines import vllm_engine
from rlhf_runtime.engines.vllm_engine import ENVIRONMENT, EngineSettings, VLLMEngine
from rlhf_runtime.errors import InputError, ResourceError, RLHFError

SETTINGS = EngineSettings("cuda", "nccl", 16, 1, 0.9, tensor_parallel_size=2)
FAILED = Exception("WorkerProc initialization failed due to an exception in a background process. See stack trace")
TRACEBACK = """\
(Worker_TP1 pid=70) ERROR 12-01 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker_TP1 pid=70) ERROR 12-01 [multiproc_executor.py:953]     raise RuntimeError("ValueError: not this")
(Worker_TP1 pid=70) ERROR 12-01 [multiproc_executor.py:953] torch.OutOfMemoryError: CUDA out of memory. Tried all.
(Worker_TP0 pid=69) ERROR 12-01 [multiproc_executor.py:953] RuntimeError: the other is gone
"""

Start = Callable[[Exception, str, type[RLHFError]], str]


@pytest.fixture
def start(make_peaked: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine that fails like this once its processes have written that; what is told of it."""
    output = tmp_path / "worker.out"
    output.write_text("OldError: of a run before\n")
    monkeypatch.setattr(vllm_engine, "STDOUT", output)
    for name in (*ENVIRONMENT, "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "set back at the end")
    folder = make_peaked()

    def run(error: Exception, written: str, kind: type[RLHFError]) -> str:
        def fail(*_: object, **__: object) -> None:
            with output.open("a") as out:
                out.write(written)
            raise error

        monkeypatch.setattr(vllm, "LLM", fail)
        with pytest.raises(kind) as caught:
            VLLMEngine(folder, SETTINGS)
        assert caught.value.__cause__ is error
        return str(caught.value).replace(str(output), "worker.out").replace(str(folder), "folder")

    return run


def test_a_failed_process_of_an_engine_is_told_by_what_it_wrote(start: Start) -> None:
    reason = "torch.OutOfMemoryError: CUDA out of memory. Tried all.; more in worker.out"
    told = start(FAILED, TRACEBACK, ResourceError)
    begin = f"models.policy: got folder, with which vLLM does not start ({reason}); expected a model and a KV "
    assert told.startswith(begin)
    assert "Fix: choose another model, change rollout.gpuMemoryUtilization or rollout.tensorParallelSize, or " in told
    told = start(FAILED, "nothing of use\n", ResourceError)
    assert "start (a process of the engine failed; more in worker.out)" in told


def test_what_vllm_refuses_is_bad_input_however_many_processes_an_engine_has(start: Start) -> None:
    refused = "(Worker_TP0 pid=1) ERROR 12-01 [x.py:1] ValueError: no room for a KV cache\n"
    assert "start (ValueError: no room for a KV cache; more in" in start(FAILED, refused, InputError)
    assert "start (ValueError: no room for a KV cache)" in start(ValueError("no room for a KV cache"), "", InputError)


def test_a_gpu_without_memory_for_the_engine_is_told(start: Start) -> None:
    told = start(RuntimeError("CUDA out of memory occurred when warming up sampler"), "", ResourceError)
    assert told.startswith("rollout.gpuMemoryUtilization: got CUDA out of memory occurred when warming up sampler; exp")
