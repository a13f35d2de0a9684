"""What a run tells of itself while it goes on: a few numbers as JSON, and every number as a Prometheus gauge."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.metrics_core import GaugeMetricFamily
from rlhf_api import RuntimeConfig
from rlhf_api.status import Progress

from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.report.summary import remaining_seconds
from rlhf_runtime.types import StepMetrics

PREFIX = "rlhf"
LABELLED = re.compile(r"(?P<name>(?:.*/)?(?P<kind>reward|time))/(?P<which>.*)")
"""Metrics that are one of several of a kind, such as `eval/reward/digits`: what tells them apart becomes a label."""
LABELS = {"reward": "name", "time": "phase"}


@dataclass(frozen=True)
class Snapshot:
    """A run after one of its steps, or before the first. Never changed, so that any thread may read it."""

    name: str
    """The job's name."""
    steps: int
    """Steps of the job."""
    metrics: StepMetrics = field(default_factory=StepMetrics)
    """The newest step's; none before the first."""
    eta_seconds: int | None = None
    """What the remaining steps will take, by the last ones."""

    @classmethod
    def of(cls, name: str, steps: int, rows: Sequence[StepMetrics]) -> "Snapshot":
        """A run of which these steps are done."""
        if not rows:
            return cls(name, steps)
        return cls(name, steps, dict(rows[-1]), round(remaining_seconds(rows, steps)))


def progress_of(snapshot: Snapshot, last_checkpoint: str | None) -> Progress:
    """The numbers of `/progress`; one that was not measured or is not finite is null."""
    metrics = snapshot.metrics
    version = metrics.get("weight_version")
    return Progress(
        step=int(metrics.get("step", 0)),
        steps=snapshot.steps,
        reward=_finite(metrics, "reward_mean"),
        kl=_finite(metrics, "kl"),
        tokens_per_second=_finite(metrics, "tokens_per_second"),
        weight_version=None if version is None else int(version),
        last_checkpoint=last_checkpoint,
        eta_seconds=snapshot.eta_seconds,
    )


def newest_checkpoint(config: RuntimeConfig) -> str | None:
    """Path of a run's newest whole checkpoint; None without one, or where its storage, which is asked, is broken."""
    if config.checkpoint is None:
        return None
    try:
        newest = CheckpointStore(Path(config.checkpoint.path), config.checkpoint.keep).newest()
    except OSError:  # a storage that is lost ends runs, and must not keep them from telling so
        return None
    return None if newest is None else str(newest)


def gauges_of(snapshot: Snapshot) -> Iterator[GaugeMetricFamily]:
    """The gauges of `/metrics`: `rlhf_` and a metric's name, with `_` for what Prometheus does not allow in one.

    Metrics of rewards and times are one gauge each with a label: `rlhf_reward{name="digits"}`,
    `rlhf_time_seconds{phase="update"}`. Texts are labels of `rlhf_run_info`.
    """
    texts = {key: value for key, value in snapshot.metrics.items() if isinstance(value, str)}
    info = {"name": snapshot.name, **{_name(key): value for key, value in texts.items()}}
    yield _gauge(f"{PREFIX}_run_info", "The run", list(info), [(list(info.values()), 1.0)])
    yield _gauge(f"{PREFIX}_steps", "Steps of the job", [], [([], snapshot.steps)])
    if snapshot.eta_seconds is not None:
        yield _gauge(f"{PREFIX}_eta_seconds", "What the remaining steps will take", [], [([], snapshot.eta_seconds)])
    families: dict[str, tuple[list[str], list[tuple[list[str], float]]]] = {}
    for key, value in ({"step": 0} | snapshot.metrics).items():
        if not isinstance(value, str):
            name, labels, values = _place(key)
            families.setdefault(name, (labels, []))[1].append((values, value))
    for name, (labels, samples) in families.items():
        yield _gauge(name, "As of the newest step; see metrics.jsonl", labels, samples)


def _place(key: str) -> tuple[str, list[str], list[str]]:
    """The gauge of a metric, the names of its labels, and their values."""
    if match := LABELLED.fullmatch(key):
        unit = "_seconds" if match["kind"] == "time" else ""
        return f"{PREFIX}_{_name(match['name'])}{unit}", [LABELS[match["kind"]]], [match["which"]]
    return f"{PREFIX}_{_name(key)}", [], []


def _gauge(name: str, text: str, labels: list[str], samples: list[tuple[list[str], float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, float(value))
    return family


def _name(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", key)


def _finite(metrics: StepMetrics, key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
