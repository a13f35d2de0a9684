"""Lines of JSON: files with a line a record, on the disk as soon as it is known, and the summary."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.sink import StepRecord
from rlhf_runtime.report.summary import Summary


class _JsonLines:
    """A file that starts anew with each run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO  # from start to close

    def start(self, config: RuntimeConfig) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", encoding="utf-8")

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
        self._write([{key: _plain(value) for key, value in record.metrics.items()}])


class SamplesFile(_JsonLines):
    """`samples.jsonl`: a few responses of each step, to be read."""

    def step(self, record: StepRecord) -> None:
        """Write one line a sample."""
        self._write([{"step": record.metrics["step"], **asdict(sample)} for sample in record.samples])


class SummaryLine:
    """The summary as a line of JSON on standard output: a run's end can be read from its log alone."""

    def start(self, config: RuntimeConfig) -> None:
        """Nothing to open."""

    def step(self, record: StepRecord) -> None:
        """Nothing to say before the end."""

    def close(self, summary: Summary) -> None:
        """Write the line."""
        sys.stdout.write(json.dumps(asdict(summary)) + "\n")
        sys.stdout.flush()


def _plain(value: float | int | str) -> float | int | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
