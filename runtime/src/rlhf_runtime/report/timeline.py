"""`timeline.json`: every call on every worker, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is Chrome's trace events as a JSON array. A reader takes an array that was never closed, so a run that was
cut short can be looked at as well.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.jsonl import read_lines
from rlhf_runtime.report.sink import StepRecord
from rlhf_runtime.report.summary import Summary
from rlhf_runtime.types import StepMetrics


class Timeline:
    """A track a worker, a row of tracks a group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO  # from start to close
        self._groups: dict[str, int] = {}
        self._ranks: set[tuple[int, int]] = set()

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        """Begin the file anew, with the calls of earlier steps."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = read_lines(self._path) if earlier else []
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write("[")
        self._separator = "\n"
        for event in kept:
            if event["ph"] == "M" and event["name"] == "process_name":
                self._groups[event["args"]["name"]] = event["pid"]
            elif event["ph"] == "M":
                self._ranks.add((event["pid"], event["tid"]))
            if event["ph"] == "M" or event["args"]["step"] <= earlier[-1]["step"]:
                self._write(**event)

    def step(self, record: StepRecord) -> None:
        """Write a step's spans."""
        for span in record.spans:
            name = span.method if span.role is None else f"{span.role}.{span.method}"
            group = self._group(span.group)
            self._name_track(group, span.rank)
            self._write(
                name=name,
                ph="X",
                ts=round(span.start * 1e6),
                dur=round((span.end - span.start) * 1e6),
                pid=group,
                tid=span.rank,
                args={"step": record.metrics["step"]},
            )
        self._file.flush()

    def close(self, summary: Summary) -> None:
        """End the array."""
        self._file.write("\n]\n")
        self._file.close()

    def _group(self, name: str) -> int:
        """The number of a group, which names it once."""
        if name not in self._groups:
            self._groups[name] = len(self._groups) + 1
            self._write(ph="M", name="process_name", pid=self._groups[name], args={"name": name})
        return self._groups[name]

    def _name_track(self, group: int, rank: int) -> None:
        """Name the track of a worker once."""
        if (group, rank) not in self._ranks:
            self._ranks.add((group, rank))
            self._write(ph="M", name="thread_name", pid=group, tid=rank, args={"name": f"rank {rank}"})

    def _write(self, **event: Any) -> None:
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"
