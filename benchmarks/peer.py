"""TRL in an environment of its own, and `rlhf run`, both driven to the same GRPO by the same settings."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RUNTIME = ROOT / "runtime" / "src" / "rlhf_runtime"
PROMPTS = RUNTIME / "builtin" / "arithmetic.jsonl"
TRL = "1.16.0"
PACKAGES = (f"trl=={TRL}", "torch==2.13.0", "accelerate", "datasets", "peft")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlhf-operator"
BETA, CLIP = 0.01, 0.2


@dataclass(frozen=True)
class Task:
    """GRPO on the built-in prompts with the share of digits as reward: one optimizer step a batch."""

    model: dict[str, Any]
    """A random model, as a manifest's `random` has it."""
    steps: int
    prompts: int
    samples: int
    max_response: int
    learning_rate: float
    seed: int = 0

    @property
    def responses(self) -> int:
        return self.prompts * self.samples


@dataclass(frozen=True)
class Step:
    """One step of a run."""

    seconds: float
    tokens: float
    reward: float
    phases: dict[str, float]
    """Seconds of generation, logprob, update and sync; what is left is `other`."""


def trl_steps(task: Task, folder: Path) -> list[Step]:
    """The steps of a task by TRL, with its default generation."""
    settings = {
        "model": str(model_folder(task, folder)),
        "rules": str(RUNTIME / "rewards" / "rules.py"),
        "prompts": str(PROMPTS),
        "output": str(folder / "trl"),
        "threads": len(os.sched_getaffinity(0)),
        "responses": task.responses,
        "samples": task.samples,
        "max_response": task.max_response,
        "steps": task.steps,
        "learning_rate": task.learning_rate,
        "beta": BETA,
        "clip": CLIP,
        "seed": task.seed,
    }
    command = [_environment() / "bin" / "python", Path(__file__).with_name("trl_grpo.py"), json.dumps(settings)]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    lines = [json.loads(line) for line in _run(command, offline).splitlines() if line.startswith('{"step"')]
    steps = []
    for line in lines:
        phases = {"generation": line["generation"], "logprob": line["logprob"], "sync": 0.0}
        phases["update"] = line["seconds"] - line["generation"] - line["logprob"]
        steps.append(Step(line["seconds"], line["tokens"], line["reward"], {**phases, "other": 0.0}))
    return steps


def our_steps(task: Task, folder: Path) -> list[Step]:
    """The steps of a task by `rlhf run`."""
    grpo = {
        "kl": {"coefficient": BETA, "estimator": "k3", "in": "loss"},
        "clipRange": {"low": CLIP, "high": CLIP},
        "lossAggregation": "tokenMean",  # TRL's default, which it calls dapo
    }
    rows = rlhf_run(manifest(task, {"grpo": grpo}), folder)
    steps = []
    for row in rows:
        names = {"generation": "rollout", "logprob": "logprob", "update": "update", "sync": "sync"}
        phases = {phase: row[f"time/{name}"] for phase, name in names.items()}
        other = row["time/step"] - sum(phases.values())
        steps.append(Step(row["time/step"], row["response_tokens"], row["reward_mean"], {**phases, "other": other}))
    return steps


def manifest(task: Task, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The job of a task under an algorithm, all roles on one bundle of this machine."""
    return {
        "apiVersion": "rlhf-operator.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "benchmark"},
        "spec": {
            "models": {"policy": {"random": task.model}},
            "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
            "data": {
                "prompts": {"builtin": "arithmetic"},
                "batchSize": task.prompts,
                "maxPromptLength": 16,
                "maxResponseLength": task.max_response,
                "seed": task.seed,
            },
            "algorithm": algorithm,
            "rollout": {"samplesPerPrompt": task.samples},
            "training": {"steps": task.steps, "optimizer": {"learningRate": task.learning_rate}},
            "nodePools": [{"name": "local", "device": "cpu"}],
        },
    }


def rlhf_run(job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a job."""
    file, runs = folder / "job.yaml", folder / "runs"
    file.write_text(json.dumps(job))
    _run([Path(sys.executable).with_name("rlhf"), "run", file, "--runs-dir", runs], {})
    text = (runs / job["metadata"]["name"] / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def model_folder(task: Task, folder: Path) -> Path:
    """The task's model, the same as `rlhf run` makes of it."""
    from rlhf_api.roles import ModelSource, RandomModel
    from rlhf_runtime.models import materialize

    return materialize(ModelSource(random=RandomModel.model_validate(task.model)), folder / "models")


def _environment() -> Path:
    """TRL's environment, made the first time."""
    folder = CACHE / f"trl-{TRL}"
    if not (folder / ".ready").exists():
        uv = shutil.which("uv") or str(CACHE / "uv" / "bin" / "uv")
        print(f"Installing {', '.join(PACKAGES)} into {folder}", flush=True)
        _run([uv, "venv", "--quiet", "--allow-existing", "--python", "3.11", folder], {})
        _run([uv, "pip", "install", "--quiet", *PACKAGES], {"VIRTUAL_ENV": str(folder)})
        (folder / ".ready").touch()
    return folder


def _run(command: list[Any], environment: dict[str, str]) -> str:
    """What a command prints.

    Raises:
        SystemExit: with the end of what it said, when it fails.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(list(map(str, command)), env=kept | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command[:3]))} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout
