"""A real control plane for the tests: the `api_server` alone or a whole `cluster`, and a `namespace` in it."""

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from control_plane import API_SERVER, CONTROLLERS, BuildError, ControlPlane, build

WHY_NOT = pytest.StashKey[str]()


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
    if session.config.option.collectonly or "api_server" not in asked:
        return
    try:
        with speaking(session.config):
            build(*API_SERVER, *(CONTROLLERS if "cluster" in asked else ()))
    except BuildError as error:
        session.config.stash[WHY_NOT] = str(error)


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> Iterator[ControlPlane]:
    """An API server for the whole session, with nobody behind it: objects are kept and checked, and nothing follows."""
    if why := request.config.stash.get(WHY_NOT, None):
        pytest.skip(f"no control plane: {why}")
    folder = Path(tempfile.mkdtemp(prefix="rlhf-cluster-"))
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
def cluster(api_server: ControlPlane) -> ControlPlane:
    """A cluster for the whole session. Objects in its own scope, such as nodes, are the test's to remove."""
    api_server.start_controllers()
    return api_server


@pytest.fixture
def namespace(api_server: ControlPlane) -> Iterator[str]:
    """A namespace of the test's own; it is deleted afterwards, without waiting."""
    name = f"test-{secrets.token_hex(4)}"
    api_server.kubectl("create", "namespace", name)
    yield name
    api_server.kubectl("delete", "namespace", name, "--wait=false")
