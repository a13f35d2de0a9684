"""What the four algorithms learn in the tasks of the examples, over seeds, and GRPO beside TRL's.

The curves go to docs/learning.png: the mean over seeds, and a band from the lowest to the highest. Start and end are
the mean rewards of the first and last steps of all seeds; z is their distance in standard errors, taken over those
steps as if they were independent. GRPO is run a second time at the settings that TRL's is run at, one optimizer step a
batch.

    python benchmarks/learning.py [--seeds 3] [--steps 60]
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peer import ROOT, Task, our_steps, rlhf_run, trl_steps
from rlhf_operator.manifest import read_manifest

EXAMPLES = {
    "PPO": "01-quickstart.yaml",
    "GRPO": "03-grpo.yaml",
    "RLOO": "04-rloo.yaml",
    "REINFORCE++": "05-reinforce-plus-plus.yaml",
}
SAME, PEER = "GRPO as TRL's", "TRL's GRPO"
EDGE = 5
"""Steps that start and end are taken over."""

Curves = dict[str, list[list[float]]]
"""Mean reward by run, seed and step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "learning.png")
    options = parser.parse_args()
    if options.seeds < 2 or options.steps < EDGE:
        parser.error(f"got {options.seeds} seeds and {options.steps} steps; expected 2 and {EDGE} at least")
    curves: Curves = {}
    for seed in range(options.seeds):
        for name, run in _runs(options.steps, seed).items():
            with tempfile.TemporaryDirectory() as folder:
                curves.setdefault(name, []).append(run(Path(folder)))
            print(f"seed {seed}: {name} ends at {statistics.mean(curves[name][-1][-EDGE:]):.3f}", flush=True)
    _plot(curves, options.plot)
    result: dict[str, Any] = {"benchmark": "learning", "seeds": options.seeds, "steps": options.steps}
    print(f"{'':16}{'start':>8}{'end':>8}{'z':>8}")
    for name, seeds in curves.items():
        start, end = ([value for seed in seeds for value in seed[edge]] for edge in (slice(EDGE), slice(-EDGE, None)))
        found = [statistics.mean(start), statistics.mean(end), _distance(start, end)]
        print(f"{name:16}{found[0]:8.3f}{found[1]:8.3f}{found[2]:8.1f}")
        result[name] = dict(zip(("start", "end", "z"), (round(value, 3) for value in found), strict=True))
    ends = [[statistics.mean(seed[-EDGE:]) for seed in curves[name]] for name in (PEER, SAME)]
    against = round(_distance(*ends), 2)
    print(f"GRPO above TRL's at the end, in standard errors over seeds: {against}")
    print(json.dumps(result | {"above_trl": against, "cpus": os.cpu_count()}))


def _runs(steps: int, seed: int) -> dict[str, Callable[[Path], list[float]]]:
    """By name, what gives the rewards of a run whose files go to a folder."""
    jobs = {name: _job(file, steps, seed) for name, file in EXAMPLES.items()}
    spec = jobs["GRPO"]["spec"]
    task = Task(
        model=spec["models"]["policy"]["random"],
        steps=steps,
        prompts=spec["data"]["batchSize"],
        samples=spec["rollout"]["samplesPerPrompt"],
        max_response=spec["data"]["maxResponseLength"],
        learning_rate=spec["training"]["optimizer"]["learningRate"],
        seed=seed,
    )
    runs: dict[str, Callable[[Path], list[float]]] = {
        name: lambda folder, job=job: [row["reward_mean"] for row in rlhf_run(job, folder)]
        for name, job in jobs.items()
    }
    runs[SAME] = lambda folder: [step.reward for step in our_steps(task, folder)]
    runs[PEER] = lambda folder: [step.reward for step in trl_steps(task, folder)]
    return runs


def _job(file: str, steps: int, seed: int) -> dict[str, Any]:
    """An example of so many steps, under a seed."""
    job = read_manifest(ROOT / "examples" / file).model_dump(mode="json", by_alias=True, exclude_unset=True)
    job["spec"]["training"]["steps"] = steps
    job["spec"]["data"]["seed"] = seed
    return job


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    """How far the second's mean lies above the first's, in standard errors of the difference."""
    error = math.hypot(*(statistics.stdev(values) / math.sqrt(len(values)) for values in (first, second)))
    return (statistics.mean(second) - statistics.mean(first)) / error if error else math.inf


def _plot(curves: Curves, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from rlhf_runtime.report.curves import COLORS

    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, seeds), color in zip(curves.items(), COLORS, strict=True):
        steps = range(1, len(seeds[0]) + 1)
        by_step = list(zip(*seeds, strict=True))
        axes.plot(steps, [statistics.mean(values) for values in by_step], color=color, label=name)
        axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), color=color, alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel="mean reward", title=f"Share of digits, {len(seeds)} seeds")
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
