"""The run as a person watches it: a live view on a terminal, one line a step anywhere else."""

import logging
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rlhf_api import RuntimeConfig

from rlhf_runtime.report.sink import Sample, StepRecord
from rlhf_runtime.report.summary import Summary, evaluation_course, remaining_seconds
from rlhf_runtime.types import StepMetrics

_PACKAGE_LOG = logging.getLogger("rlhf_runtime")

PHASES = ("rollout", "logprob", "value", "reward", "update", "sync")
"""Parts of a step, in order; each is timed as `time/<phase>`."""

_BLOCKS = "▁▂▃▄▅▆▇█"


class TerminalView:
    """Progress on `console`. Between steps it shows what the package logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._notes = _Notes(self._console)
        self._live: Live | None = None
        self._rows: list[StepMetrics] = []
        self._steps = 0

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        """Show the view."""
        self._rows += earlier
        self._steps = config.training.steps
        _PACKAGE_LOG.setLevel(logging.INFO)
        _PACKAGE_LOG.addHandler(self._notes)
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=self._console,
        )
        self._task = self._progress.add_task(config.name, total=self._steps, eta="-", completed=len(earlier))
        self._live = Live(self._progress, console=self._console)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        metrics = record.metrics
        self._rows.append(metrics)
        eta = _duration(remaining_seconds(self._rows, self._steps))
        if self._live is None:
            _write_line(self._console, step_line(metrics, self._steps, eta))
            return
        self._progress.update(self._task, completed=int(metrics["step"]), eta=eta)
        self._live.update(Group(self._progress, _details(self._rows, record.samples)))

    def close(self, summary: Summary) -> None:
        """End the view and print the summary."""
        _PACKAGE_LOG.removeHandler(self._notes)
        if self._live is not None:
            self._live.stop()
        style = "bold red" if summary.verdict in ("fell", "did not rise") else None
        for line in summary.render().splitlines():
            self._console.print(Text(line, style=style if line.startswith("REWARD") else ""), soft_wrap=True)


class _Notes(logging.Handler):
    """Log records as lines of their own, above a live view where there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        _write_line(self._console, record.getMessage())


def _write_line(console: Console, line: str) -> None:
    """A line at once, whole, also where standard output is a file or a pipe."""
    console.out(line, highlight=False)
    console.file.flush()


def step_line(metrics: StepMetrics, steps: int, eta: str) -> str:
    """One step in one line."""
    parts = [f"step {metrics['step']}/{steps}", *(f"{name} {value}" for name, value in _numbers(metrics))]
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:.0f} tok/s")
    phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in _phases(metrics))
    parts.append(f"{metrics.get('time/step', 0.0):.1f} s ({phases})")
    if "eval/reward_mean" in metrics:
        parts.append(f"held-out reward {metrics['eval/reward_mean']:.3f} in {metrics['time/eval']:.1f} s")
    return "  ".join([*parts, f"eta {eta}"])


def _numbers(metrics: StepMetrics) -> list[tuple[str, str]]:
    """The numbers that tell how training goes, with the digits that matter."""
    formats = (("reward", "reward_mean", ".3f"), ("kl", "kl", ".4f"), ("entropy", "entropy", ".2f"))
    return [(name, format(metrics[key], form)) for name, key, form in formats if key in metrics]


def _phases(metrics: StepMetrics) -> list[tuple[str, float]]:
    return [(name, float(metrics[f"time/{name}"])) for name in PHASES if f"time/{name}" in metrics]


def _details(rows: Sequence[StepMetrics], samples: Sequence[Sample]) -> RenderableType:
    """What is below the bar: the newest step and the reward's course."""
    metrics = rows[-1]
    rewards = [float(row["reward_mean"]) for row in rows if "reward_mean" in row]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="ellipsis", no_wrap=True)
    grid.add_row("reward", Text.assemble((format(rewards[-1], ".3f"), "bold"), "  ", (sparkline(rewards), "green")))
    if held_out := [value for _, value in evaluation_course(rows)]:
        grid.add_row("held out", Text.assemble((format(held_out[-1], ".3f"), "bold"), "  ", sparkline(held_out)))
    grid.add_row(
        "policy", _pairs(metrics, ("kl", ".4f"), ("entropy", ".2f"), ("policy_loss", ".4f"), ("clip_fraction", ".3f"))
    )
    if "value_loss" in metrics:
        grid.add_row("critic", _pairs(metrics, ("value_loss", ".4f"), ("explained_variance", ".2f")))
    grid.add_row("speed", _pairs(metrics, ("tokens_per_second", ".0f"), ("response_tokens", "d")))
    times = " ".join(f"{name} {seconds:.1f}" for name, seconds in _phases(metrics))
    grid.add_row("step", f"{metrics.get('time/step', 0.0):.1f} s: {times}")
    if "weight_version" in metrics:
        grid.add_row("weights", f"v{metrics['weight_version']} by {metrics.get('sync_path', '?')}")
    for sample in samples[:1]:  # repr, so that control characters of a response cannot reach the terminal
        grid.add_row("sample", Text(f"{sample.score:.2f} {sample.prompt[-30:]!r} -> {sample.response[:200]!r}"))
    return grid


def _pairs(metrics: StepMetrics, *keys: tuple[str, str]) -> str:
    return "  ".join(f"{key.replace('_', ' ')} {format(metrics[key], form)}" for key, form in keys if key in metrics)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The course of `values` in at most `width` block characters, each the mean of an equal share of them."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


def _duration(seconds: float) -> str:
    """`45s`, `2m10s` or `3h05m`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
