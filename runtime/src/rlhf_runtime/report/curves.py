"""`curves.png`: the run at a glance, drawn at its end."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.console import PHASES
from rlhf_runtime.report.sink import StepRecord
from rlhf_runtime.report.summary import Summary, evaluation_course
from rlhf_runtime.types import StepMetrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#333333", "#dddddd"
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's palette, told apart by readers who are color-blind."""


class Curves:
    """Keeps every step's metrics and draws them on close; a run without steps leaves no file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[StepMetrics] = []
        self._name = ""

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        """Take the job's name, and what was drawn before."""
        self._rows += earlier
        self._name = config.name

    def step(self, record: StepRecord) -> None:
        """Keep a step."""
        self._rows.append(record.metrics)

    def close(self, summary: Summary) -> None:
        """Draw."""
        if self._rows:
            draw(self._rows, f"{self._name}: {summary.steps} of {summary.planned_steps} steps", self._path)


def draw(rows: Sequence[StepMetrics], title: str, path: Path) -> None:
    """Draw six panels: reward, KL, entropy, losses, critic and clipping, where the time went."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, color=INK, fontsize=14)
    reward, kl, entropy, losses, critic, times = figure.subplots(2, 3).flat
    _held_out(reward, rows)
    _panel(reward, rows, "Reward", [("reward_mean", "mean of the step")], smooth=True)
    _panel(kl, rows, "KL to the reference", [("kl", "kl")])
    _panel(entropy, rows, "Entropy (nats a token)", [("entropy", "entropy")])
    _panel(losses, rows, "Losses", [("policy_loss", "policy"), ("value_loss", "value")])
    critic_keys = [("explained_variance", "explained variance"), ("clip_fraction", "clipped share")]
    _panel(critic, rows, "Critic and clipping", critic_keys)
    _times(times, rows)
    for axes in (losses, critic, times):
        axes.set_xlabel("step", color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(
    axes: "Axes", rows: Sequence[StepMetrics], title: str, keys: Sequence[tuple[str, str]], smooth: bool = False
) -> None:
    drawn = 0
    for (key, label), color in zip(keys, COLORS, strict=False):
        steps, values = _series(rows, key)
        if not values:
            continue
        drawn += 1
        many = len(values) >= 20 and smooth
        axes.plot(steps, values, color=color, linewidth=1.2 if many else 1.8, alpha=0.35 if many else 1, label=label,
                  marker="o" if len(values) < 20 else None, markersize=4)  # fmt: skip
        if many:
            axes.plot(steps, _moving_mean(values, 10), color=color, linewidth=2.2, label="mean of 10 steps")
    _dress(axes, title)
    if drawn == 0:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color=INK)
    elif drawn > 1 or smooth:
        axes.legend(frameon=False, labelcolor=INK)


def _held_out(axes: "Axes", rows: Sequence[StepMetrics]) -> None:
    """Points of the evaluations, the first of them at step 0."""
    if course := evaluation_course(rows):
        steps, values = zip(*course, strict=True)
        axes.plot(steps, values, color=COLORS[1], marker="D", markersize=5, linestyle=":", label="held-out prompts")


def _times(axes: "Axes", rows: Sequence[StepMetrics]) -> None:
    """Seconds a step, stacked by phase; `other` is what the phases leave of the step."""
    steps = [int(row["step"]) for row in rows]
    phases = [phase for phase in PHASES if any(f"time/{phase}" in row for row in rows)]
    layers = [[float(row.get(f"time/{phase}", 0.0)) for row in rows] for phase in phases]
    rest = [
        max(0.0, float(row.get("time/step", 0.0)) - sum(layer[index] for layer in layers))
        for index, row in enumerate(rows)
    ]
    colors = [*COLORS[: len(phases)], "#bbbbbb"]
    edges = [steps[0] - 0.5, *(step + 0.5 for step in steps)]  # a step is as wide as 1, also where there is only one
    stacked = [[*layer[:1], *layer] for layer in [*layers, rest]]
    axes.stackplot(edges, stacked, labels=[*phases, "other"], colors=colors, step="pre", linewidth=0)
    _dress(axes, "Seconds a step")
    axes.legend(frameon=False, labelcolor=INK, ncols=4, fontsize="small", loc="upper center")
    totals = [sum(heights) for heights in zip(*layers, rest, strict=True)]
    axes.set_ylim(0, 1.35 * max(totals) or 1)  # room for the legend


def _dress(axes: "Axes", title: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _series(rows: Sequence[StepMetrics], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric where it is a finite number."""
    pairs = [(int(row["step"]), float(row[key])) for row in rows if key in row and math.isfinite(float(row[key]))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values at each point, of fewer at the start."""
    windows = (values[max(0, index + 1 - width) : index + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]
