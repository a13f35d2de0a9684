"""What images and compose.yaml must share with what the operator renders, and with what the tests ran with."""

import json
import re
from pathlib import Path

import pytest
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest
from rlhf_operator.manifests import render
from rlhf_operator.manifests.security import USER
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


def pins(name: str) -> set[str]:
    return set(re.findall(r"^\S+==\S+", (ROOT / "requirements" / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("build", ["cpu", "gpu"])
def test_the_runtime_has_the_versions_that_the_tests_ran_with(build):
    image = pins(f"runtime-{build}.txt")
    assert image
    assert image <= pins(f"{build}.txt")


def test_no_tool_of_the_developers_is_in_the_runtime():
    assert not [pin for pin in pins("runtime-cpu.txt") if re.match("(pytest|ruff|mypy|kopf|kubernetes|triton)==", pin)]


def test_the_runtime_runs_as_the_user_of_the_pods():
    assert f"\nUSER {USER}:{USER}\n" in (ROOT / "docker/runtime.Dockerfile").read_text()


def test_compose_offers_what_the_quickstart_asks_for():
    compose = YAML(typ="safe").load(ROOT / "docker/compose.yaml")
    options = dict(word[2:].split("=", 1) for word in compose["services"]["worker"]["command"] if "=" in word)

    plan = plan_cluster(read_manifest(ROOT / "examples/01-quickstart.yaml"), "none")
    (group,) = render(plan, owner=None, cluster=1).ray_cluster["spec"]["workerGroupSpecs"]
    asked = group["rayStartParams"]

    assert options["num-cpus"] == asked["num-cpus"]
    assert json.loads(options["resources"]) == json.loads(asked["resources"].strip("'"))


def test_compose_runs_the_images_of_this_release():
    version = re.search(r'^version = "(.*)"', (ROOT / "runtime/pyproject.toml").read_text(), re.MULTILINE)
    images = re.findall(r"-localhost/rlhf-\w+:([^}]+)}", (ROOT / "docker/compose.yaml").read_text())
    assert images == [version[1], version[1]]
