"""A real control plane for the tests: the `api_server` alone or a whole `cluster`, and a `namespace` in it."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_plane import API_SERVER, CONTROLLERS, BuildError, Cluster, ControlPlane, build

WHY_NOT = pytest.StashKey[str]()
OUTSIDE = os.environ.get("RLHF_TEST_CLUSTER") == "kubeconfig"
"""Whether the tests take the cluster that KUBECONFIG names, which has KubeRay and KWOK, instead of one of their own."""


class OutsideCluster(Cluster):
    """A cluster that somebody else runs: what takes its processes or its audit log is skipped."""

    def __getattr__(self, name: str) -> Any:
        if name in vars(ControlPlane):
            pytest.skip(f"{name} takes a control plane of the tests' own")
        raise AttributeError(name)


@contextmanager
def speaking(config: pytest.Config) -> Iterator[None]:
    """What is printed is seen at once, whatever pytest captures."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        yield
        return
    with capture.global_and_fixture_disabled():
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the programs before any test's clock runs: a cold build takes longer than a test may."""
    asked = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if OUTSIDE or session.config.option.collectonly or "api_server" not in asked:
        return
    try:
        with speaking(session.config):
            build(*API_SERVER, *(CONTROLLERS if "cluster" in asked else ()))
    except BuildError as error:
        session.config.stash[WHY_NOT] = str(error)


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An API server for the whole session, with nobody behind it: objects are kept and checked, and nothing follows."""
    if why := request.config.stash.get(WHY_NOT, None):
        pytest.skip(f"no control plane: {why}")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-cluster-"))
    if OUTSIDE:
        yield OutsideCluster(Path(os.environ["KUBECONFIG"]), folder, build("kubectl")["kubectl"])
        shutil.rmtree(folder)
        return
    failed = request.session.testsfailed
    try:
        with ControlPlane.start(folder) as running:
            yield running
    except BaseException:
        failed = -1
        raise
    finally:
        if request.session.testsfailed == failed:
            shutil.rmtree(folder)
        else:
            shutil.rmtree(folder / "etcd", ignore_errors=True)
            with speaking(request.config):
                print(f"\nThe cluster's logs are kept in {folder}")  # noqa: T201


@pytest.fixture(scope="session")
def cluster(api_server: Cluster) -> Cluster:
    """A cluster for the whole session. Objects in its own scope, such as nodes, are the test's to remove."""
    if isinstance(api_server, ControlPlane):
        api_server.start_controllers()
    return api_server


@pytest.fixture
def namespace(api_server: Cluster) -> Iterator[str]:
    """A namespace of the test's own; it is deleted afterwards, without waiting."""
    name = f"test-{secrets.token_hex(4)}"
    api_server.kubectl("create", "namespace", name)
    yield name
    api_server.kubectl("delete", "namespace", name, "--wait=false")
