"""Peak memory of each role's process beside what parameters, gradients, optimizer and activations make on paper.

Each role runs in a process of its own, on one rank: policy, critic and reference on one micro-batch of packed rows, the
rollout on as many prompts. Measured is what the process grew by over one that has everything imported.

On paper, for P parameters, T tokens of a micro-batch, and layers of hidden size h and intermediate size i, in float32:

    policy, critic   16 P for parameters, gradients, two moments, and T layers (11 h + 4 i) 4 of activations
    reference        4 P, and T (11 h + 4 i) 4 of one layer
    rollout          4 P, and the KV cache

    python benchmarks/memory.py [--rows 48] [--tokens 144]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from step import MODEL

ROLES = ("policy", "critic", "reference", "rollout")
MIB = 1 << 20
STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48, help="rows of the micro-batch")
    parser.add_argument("--tokens", type=int, default=144, help="tokens of a row, prompt and response")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        print(json.dumps(_grown(options.role, options.folder, options.rows, options.tokens)))
        return
    result = {"benchmark": "memory", "rows": options.rows, "tokens": options.tokens, "cpus": os.cpu_count()}
    print(f"{'role':12}{'on paper':>12}{'peak':>12}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        parameters = _make_model(Path(folder))
        for role in ROLES:
            expected = _on_paper(role, parameters, options.rows * options.tokens) / MIB
            command = [sys.executable, __file__, "--role", role, "--folder", folder]
            command += ["--rows", str(options.rows), "--tokens", str(options.tokens)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            peak = json.loads(done.stdout.strip().splitlines()[-1]) / MIB
            print(f"{role:12}{expected:8.0f} MiB{peak:8.0f} MiB{peak / expected:8.2f}", flush=True)
            found = {"paper": expected, "peak": peak, "ratio": peak / expected}
            result[role] = {name: round(value, 2) for name, value in found.items()}
    print(json.dumps(result))


def _make_model(folder: Path) -> int:
    """Write the model, and count its parameters."""
    from rlhf_api.roles import ModelSource, RandomModel
    from rlhf_runtime.models import materialize
    from safetensors.torch import load_file

    made = materialize(ModelSource(random=RandomModel.model_validate(MODEL)), folder / "made")
    made.rename(folder / "model")
    return sum(tensor.numel() for tensor in load_file(folder / "model" / "model.safetensors").values())


def _on_paper(role: str, parameters: int, tokens: int) -> int:
    """Bytes."""
    config = MODEL["config"]
    layer = tokens * (11 * config["hidden_size"] + 4 * config["intermediate_size"]) * 4
    return {
        "policy": 16 * parameters + config["num_hidden_layers"] * layer,
        "critic": 16 * parameters + config["num_hidden_layers"] * layer,
        "reference": 4 * parameters + layer,
        "rollout": 4 * parameters + (1 << 30),
    }[role]


def _grown(role: str, folder: Path, rows: int, tokens: int) -> int:
    """Bytes that this process grew by while it did a role's work."""
    work = _rollout_work if role == "rollout" else _torch_work
    run = work(role, folder, rows, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _peak()
    run()
    return _peak() - before


def _peak() -> int:
    """Most bytes of memory that this process had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def _torch_work(role: str, folder: Path, rows: int, tokens: int):
    import torch
    import torch.distributed as dist
    from rlhf_api.training import Optimizer
    from rlhf_runtime.engines.sequences import Sequences
    from rlhf_runtime.engines.torch_engine import TorchEngine
    from transformers.models.qwen2 import modeling_qwen2  # noqa: F401  # imports are no part of what a role takes

    store = folder / f"store-{role}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    batch = Sequences([torch.full((16,), 5)] * rows, [torch.full((tokens - 16,), 7)] * rows)

    def run() -> None:
        engine = TorchEngine(
            folder / "model",
            head="value" if role == "critic" else "lm",
            device=torch.device("cpu"),
            micro_batch_tokens=rows * tokens,
            optimizer=None if role == "reference" else Optimizer(),
        )
        for _ in range(STEPS):
            if role == "reference":
                engine.score(batch)
            else:
                engine.train_step(batch, lambda outputs, at: outputs[0].sum() / batch.tokens)

    return run


def _rollout_work(role: str, folder: Path, rows: int, tokens: int):
    from rlhf_runtime.engines.vllm_engine import ENVIRONMENT, EngineSettings, Sampling, VLLMEngine

    os.environ |= ENVIRONMENT
    # What it imports when it is used, as imports are no part of what a role takes.
    import vllm.model_executor.models.qwen2
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    def run() -> None:
        engine = VLLMEngine(folder / "model", EngineSettings("cpu", "shm", tokens, 1, 0.5))
        sampling = Sampling(temperature=1.0, max_tokens=tokens - 16, stop_token_ids=(1,))
        for _ in range(STEPS):
            engine.generate([[5] * 16] * rows, list(range(rows)), sampling, 0)

    return run


if __name__ == "__main__":
    main()
