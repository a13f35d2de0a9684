"""The chart as helm renders it. helm is built from its Go module on first use, before any test's clock runs."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import BuildError, build
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rlhf-operator"
HELM = pytest.StashKey[Path | str]()
Object = dict[str, Any]
Render = Callable[..., list[Object]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Builds helm before the clock of the first test that needs it runs."""
    if "helm" in getattr(item, "fixturenames", ()) and HELM not in item.config.stash:
        try:
            item.config.stash[HELM] = build("helm")["helm"]
        except BuildError as error:
            item.config.stash[HELM] = str(error)
    return (yield)


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest) -> Path:
    """The program."""
    program = request.config.stash[HELM]
    if isinstance(program, str):
        pytest.skip(f"no helm: {program}")
    return program


@pytest.fixture(scope="session")
def template(helm: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`helm template`, of a release named `release` in the namespace `ops`, with further arguments."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [helm, "template", "release", CHART, "--namespace", "ops", "--kube-version", "1.34.0", *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="session")
def render(template: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """The objects of the chart with some values, `--set`'s way."""

    def objects(*sets: str, values: str | None = None) -> list[Object]:
        args = [word for assignment in sets for word in ("--set-json", assignment)]
        done = template(*args, *(["--values", str(CHART / "ci" / values)] if values else []))
        assert done.returncode == 0, done.stderr
        return [document for document in YAML(typ="safe").load_all(done.stdout) if document]

    return objects
