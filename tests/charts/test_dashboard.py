"""The dashboard asks for what the operator exports."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from grafana import DASHBOARD, NAME, queries
from rlhf_api.status import Phase
from rlhf_operator.metrics import Metrics

ROOT = Path(__file__).parents[2]
ADDED = {"namespace"}
"""Labels that Prometheus adds to whatever it scrapes."""


def exported() -> dict[str, set[str]]:
    """Every sample's name with its labels, from a registry in which each metric has been seen once."""
    metrics = Metrics()
    metrics.started(0.1)
    metrics.finished("done", 0.1)
    metrics.resynced(["Training"])
    metrics._failures.labels("Program", "Error").inc()
    return {
        sample.name: set().union(*(set(other.labels) for other in family.samples if other.name == sample.name))
        for family in metrics.registry.collect()
        for sample in family.samples
    }


@pytest.mark.parametrize(("title", "query"), queries())
def test_every_query_is_of_exported_metrics_and_labels(title: str, query: str):
    samples = exported()
    names = NAME.findall(query)
    assert names, title
    for name in names:
        assert name in samples
    labels = {label for part in re.findall(r"\{([^}]*)\}", query) for label in re.findall(r"(\w+)\s*=", part)}
    labels |= {label.strip() for part in re.findall(r"by \(([^)]*)\)", query) for label in part.split(",")}
    assert labels - ADDED <= set().union(*(samples[name] for name in names))


def test_the_phases_that_are_asked_for_exist():
    phases = [found for _, query in queries() for found in re.findall(r'phase=~?"([^"]*)"', query)]
    assert phases
    assert {phase for found in phases for phase in found.split("|")} <= set(get_args(Phase))


def test_every_metric_of_the_operator_is_on_the_dashboard_and_in_the_manual():
    manual = set(NAME.findall((ROOT / "docs" / "administration.md").read_text()))
    shown = {name for _, query in queries() for name in NAME.findall(query)}
    families = {re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in exported() if "rlhf" in name}
    for told in (shown, manual):
        assert families == {re.sub(r"_(total|bucket)$", "", name) for name in told if "rlhf" in name}


def test_it_is_rendered_whole(render: Callable[..., list[dict[str, Any]]]):
    (found,) = [
        item for item in render("dashboard.enabled=true") if item["kind"] == "ConfigMap" and "dashboard" in str(item)
    ]
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["rlhf-operator.json"]) == json.loads(DASHBOARD.read_text())
    assert not [item for item in render() if item["kind"] in ("ConfigMap", "ServiceMonitor")]
