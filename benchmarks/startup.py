"""How long `rlhf run` takes to its first step, beside the same pieces one after the other.

The floor is what nobody can leave out: importing torch and vLLM, starting Ray, starting a bare engine of the same
model, in a fresh process. Both are run in turn, after a warm-up, since the machine is noisy.

    python benchmarks/startup.py [--rounds 3]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MANIFEST = Path(__file__).parents[1] / "examples" / "01-quickstart.yaml"
FIRST_STEP = "first step"
"""What the console says when everything is up; part of its first line."""

FLOOR = """
import json, os, sys, time
marks = [("start", time.perf_counter())]
mark = lambda name: marks.append((name, time.perf_counter()))
import torch
mark("import torch")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
from vllm import LLM
mark("import vllm")
import ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
mark("start ray")
LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=48, skip_tokenizer_init=True)
mark("start engine")
print("\\n" + json.dumps({name: end - begin for (_, begin), (name, end) in zip(marks, marks[1:])}), flush=True)
ray.shutdown()
os._exit(0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds after one warm-up")
    rounds = parser.parse_args().rounds
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        samples = [(_floor(_model(folder)), _first_step(folder)) for _ in range(rounds + 1)][1:]
    pieces = {name: statistics.median(floor[name] for floor, _ in samples) for name in samples[0][0]}
    ratios = [ours / sum(floor.values()) for floor, ours in samples]
    result = {
        "benchmark": "startup",
        "floor_seconds": round(sum(pieces.values()), 2),
        "first_step_seconds": round(statistics.median(ours for _, ours in samples), 2),
        "ratio_median": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "rounds": rounds,
        "cpus": os.cpu_count(),
    }
    for name, seconds in pieces.items():
        print(f"{name:14} {seconds:6.2f} s")
    print(f"{'floor':14} {result['floor_seconds']:6.2f} s")
    print(f"{'rlhf run':14} {result['first_step_seconds']:6.2f} s to its first step")
    print(f"{'ratio':14} {result['ratio_median']:6.2f}")
    print(json.dumps(result))


def _model(folder: str) -> Path:
    """The quickstart's model, made once."""
    from rlhf_operator.manifest import read_manifest
    from rlhf_runtime.models import materialize

    return materialize(read_manifest(MANIFEST).spec.models.policy, Path(folder) / "models")


def _floor(model: Path) -> dict[str, float]:
    """Seconds of each piece in a process of its own."""
    done = subprocess.run([sys.executable, "-c", FLOOR, str(model)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _first_step(folder: str) -> float:
    """Seconds from the start of `rlhf run` to the line that says the first step begins."""
    command = [Path(sys.executable).parent / "rlhf", "run", MANIFEST, "--runs-dir", Path(folder) / "runs"]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        lines = []
        for line in run.stdout:
            lines.append(line)
            if FIRST_STEP in line:
                seconds = time.perf_counter() - begin
                run.terminate()
                return seconds
    raise SystemExit(f"rlhf run ended with exit code {run.returncode} before its first step:\n{''.join(lines)}")


if __name__ == "__main__":
    main()
