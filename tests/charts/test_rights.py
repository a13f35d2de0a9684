"""The operator may do what it does, and nothing beyond: its story is played, and what it asked for is compared."""

from collections.abc import Callable, Iterator
from typing import Any

import operator_world
import pytest
from operator_world import FakeKube, World
from rlhf_operator.kube import RLHFJOBS, ConflictError
from rlhf_operator.ray_jobs import DriverView

Right = tuple[str, str]
Render = Callable[..., list[dict[str, Any]]]
VERBS = {"apply": ("create", "patch")}
"""Server-side apply creates what is not there."""
WATCHED: set[Right] = {(verb, kind) for verb in ("list", "watch") for kind in ("rlhfjobs", "rayclusters")}
"""What kopf asks for beside what is asked through `kube`; the definitions it watches in cluster mode alone."""
DEFINITIONS: set[Right] = {(verb, "customresourcedefinitions") for verb in ("list", "watch")}


class Recorder(FakeKube):
    """An API server that remembers which subresource was patched."""

    def patch(self, resource: Any, namespace: str, name: str, patch: Any, subresource: str = "") -> Any:
        try:
            return super().patch(resource, namespace, name, patch, subresource)
        finally:
            verb, plural, _ = self.calls.pop()
            self.calls.append((verb, f"{plural}/{subresource}" if subresource else plural, name))


@pytest.fixture(scope="module")
def used() -> set[Right]:
    """What is asked for from a job's first cluster to its own deletion."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator_world, "FakeKube", Recorder)
        world = World()
    world.submit(ttlSecondsAfterFinished=60)
    world.kube.failures["patch"] = [ConflictError(409, "Conflict", "another wrote in between")]
    world.kube.failures["create"] = [ConflictError(409, "AlreadyExists", "it is there since a moment ago")]
    world.settle()
    world.set_cluster("math-1", ready=0, head=False)
    world.later(30)
    world.train()
    world.rays.set(world.status()["submissionId"], DriverView("succeeded"))
    world.settle()
    world.later(120)
    assert not world.kube.all(RLHFJOBS)
    calls = {(verb, plural) for verb, plural, _ in world.kube.calls}
    return {(right, plural) for verb, plural in calls for right in VERBS.get(verb, (verb,))} | WATCHED


def granted(objects: list[dict[str, Any]], kind: str) -> Iterator[Right]:
    for item in objects:
        if item["kind"] == kind and "aggregate" not in str(item["metadata"]["labels"]):
            for rule in item["rules"]:
                yield from ((verb, resource) for verb in rule["verbs"] for resource in rule["resources"])


def test_in_the_whole_cluster(render: Render, used: set[Right]):
    assert set(granted(render(), "ClusterRole")) == used | DEFINITIONS


def test_in_namespaces(render: Render, used: set[Right]):
    cluster_wide = {(verb, kind) for verb, kind in used if kind in ("nodes", "customresourcedefinitions")}
    assert set(granted(render('watchNamespaces=["team"]'), "Role")) == used - cluster_wide


def test_who_may_view_jobs_may_view_their_clusters(render: Render):
    (view,) = [item for item in render() if item["metadata"]["name"].endswith(":view")]
    read = {(verb, resource) for rule in view["rules"] for verb in rule["verbs"] for resource in rule["resources"]}
    clusters = ("rlhfjobs", "rlhfjobs/status", "rayclusters")
    assert read == {(verb, resource) for verb in ("get", "list", "watch") for resource in clusters}


def test_no_rule_uses_a_wildcard(render: Render):
    rules = [rule for item in render() for rule in item.get("rules", []) if isinstance(rule, dict)]
    assert rules
    assert "*" not in {word for rule in rules for part in rule.values() for word in part}
