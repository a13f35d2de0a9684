"""Files of JSON: a line a record, on the disk as soon as it is known."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.sink import StepRecord
from rlhf_runtime.report.summary import Summary
from rlhf_runtime.types import StepMetrics


class _JsonLines:
    """A file that starts anew with each run, or goes on after the steps that are kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO  # from start to close

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = self._kept(earlier)
        self._file = self._path.open("w", encoding="utf-8")
        self._write(kept)

    def _kept(self, earlier: Sequence[StepMetrics]) -> Sequence[Mapping[str, object]]:
        """The records of earlier steps."""
        raise NotImplementedError

    def close(self, summary: Summary) -> None:
        self._file.close()

    def _write(self, records: Sequence[Mapping[str, object]]) -> None:
        for record in records:
            self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()


class MetricsFile(_JsonLines):
    """`metrics.jsonl`: the metrics of a step. What is not finite is written as null, which JSON has a word for."""

    def step(self, record: StepRecord) -> None:
        """Write one line."""
        self._write([_plain(record.metrics)])

    def _kept(self, earlier: Sequence[StepMetrics]) -> Sequence[Mapping[str, object]]:
        return [_plain(row) for row in earlier]


class SamplesFile(_JsonLines):
    """`samples.jsonl`: a few responses of each step, and marked ones of each evaluation, to be read."""

    def step(self, record: StepRecord) -> None:
        """Write one line a sample."""
        step = record.metrics["step"]
        self._write([{"step": step, **asdict(sample)} for sample in record.samples])
        self._write([{"step": step, **asdict(sample), "evaluation": True} for sample in record.held_out])

    def _kept(self, earlier: Sequence[StepMetrics]) -> Sequence[Mapping[str, object]]:
        records = read_lines(self._path) if earlier else []
        return [record for record in records if record["step"] <= earlier[-1]["step"]]


def _plain(metrics: StepMetrics) -> dict[str, float | int | str | None]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in metrics.items()
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file with one JSON object a line; none where there is no file.

    Commas after them are let through. Lines that are none, such as one that was being written when its run ended, are
    left out.
    """
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line.rstrip(",")))
    return [record for record in records if isinstance(record, dict)]
