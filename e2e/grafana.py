"""The chart's Grafana dashboard, and the metrics that it asks for."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

DASHBOARD = Path(__file__).parents[1] / "charts" / "rlhf-operator" / "files" / "dashboard.json"
NAME = re.compile(r"\b(?:rlhf|process)_[a-z_]+\b")
"""A metric's name inside a query."""


def queries() -> Iterator[tuple[str, str]]:
    """Title and expression of every query."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
