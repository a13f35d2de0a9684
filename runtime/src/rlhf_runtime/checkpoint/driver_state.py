"""`driver.json` and `metrics.jsonl`: what the driver has to know to go on, and what it told so far.

Floats are written with as many digits as bring back the same bits.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_api.base import ApiModel, JsonObject

if TYPE_CHECKING:
    from rlhf_runtime.types import StepMetrics

STATE, METRICS = "driver.json", "metrics.jsonl"


class DriverState(ApiModel):
    """The driver's own part of a checkpoint. Seeds of samples need none: they follow from version and place."""

    prompts: JsonObject
    """Position of the prompt loader, within and across epochs."""
    response_lengths: JsonObject
    """What is expected of the lengths of responses, by which engines are chosen."""
    kl_coefficient: float
    """Of the next step."""

    def write(self, folder: Path) -> None:
        """Write it."""
        (folder / STATE).write_text(json.dumps(self.model_dump(mode="json", by_alias=True)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "DriverState":
        """Read it from a whole checkpoint."""
        return cls.model_validate(json.loads((folder / STATE).read_text()), by_alias=True, by_name=False)


def write_metrics(folder: Path, rows: "Sequence[StepMetrics]") -> None:
    """Write a line a step, what is not finite too, which JSON has no word for but Python's has."""
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_metrics(folder: Path) -> "list[StepMetrics]":
    """The lines of a whole checkpoint."""
    return [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
