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

PROGRAMS = {"api_server": API_SERVER, "cluster": CONTROLLERS}
"""What the fixtures start."""
BUILT = pytest.StashKey[dict[str, str]]()
"""Of each fixture whose programs were built: why they could not be, or nothing."""
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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Builds programs before the clock of the first test that needs them: a cold build takes longer than a test may.

    It is called for tests of other folders too, whose fixtures may have the same names.
    """
    built = item.config.stash.setdefault(BUILT, {})
    here = Path(__file__).parent in item.path.parents
    for fixture, programs in PROGRAMS.items():
        if here and fixture in getattr(item, "fixturenames", ()) and not OUTSIDE and fixture not in built:
            try:
                with speaking(item.config):
                    build(*programs)
                built[fixture] = ""
            except BuildError as error:
                built[fixture] = str(error)
    return (yield)


def _there(fixture: str, config: pytest.Config) -> None:
    if why := config.stash[BUILT].get(fixture):
        pytest.skip(f"no control plane: {why}")


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An API server for the whole session, with nobody behind it: objects are kept and checked, and nothing follows."""
    _there("api_server", request.config)
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
def cluster(api_server: Cluster, pytestconfig: pytest.Config) -> Cluster:
    """A cluster for the whole session. Objects in its own scope, such as nodes, are the test's to remove."""
    _there("cluster", pytestconfig)
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
