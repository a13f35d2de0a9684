"""The operator's parts put together: what it hears, what it lists, and how healthy it is."""

import asyncio
import socket
import urllib.request
from typing import Any

import kopf
import pytest
from operator_world import NAMESPACE, World, job_manifest
from rlhf_operator.handlers import Operator, registry_of
from rlhf_operator.kube import RAYCLUSTERS, RLHFJOBS, Access, ForbiddenError, NotFoundError
from rlhf_operator.metrics import Health, Metrics
from rlhf_operator.settings import Settings


class FakeApi:
    """The world's API server, with what an operator asks of credentials."""

    def __init__(self, world: World) -> None:
        self._kube = world.kube
        self.in_pod = True

    def access(self) -> Access:
        raise AssertionError("in a pod no proxy is needed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kube, name)


@pytest.fixture
def world() -> World:
    made = World()
    made.submit()
    return made


def play(world: World, scenario, **changes: Any) -> None:
    """Let an operator live for the time of a scenario, with settings of its own."""

    async def made() -> None:
        settings = Settings(metrics_port=0, health_port=0, resync_seconds=3600, **changes)
        operator = Operator(settings, FakeApi(world))  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(scenario(operator), 30)
        finally:
            await operator.stop()

    asyncio.run(made())


async def until(holds) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_nothing_is_decided_before_everything_was_listed(world):
    """A RayCluster that was not heard of yet would count as lost."""
    world.train()
    before = len(world.kube.writes)

    async def scenario(operator):
        operator.see_job(world.kube.peek(RLHFJOBS, "math"), gone=False)
        assert len(operator.queue) == 0
        operator.start()
        await until(lambda: operator.health.alive and len(operator.store) == 1 and operator.queue.idle)

    play(world, scenario)
    assert world.kube.writes[before:] == []


def test_what_was_heard_of_before_the_first_list_is_worked_on_at_once_after_it(world):
    async def scenario(operator):
        operator.see_job(world.kube.peek(RLHFJOBS, "math"), gone=False)
        operator.start()
        await until(lambda: world.clusters() == ["math-1"])

    play(world, scenario)


def test_jobs_and_clusters_that_are_heard_of_are_worked_on(world):
    async def scenario(operator):
        operator.start()
        await until(lambda: world.clusters() == ["math-1"])
        world.set_cluster("math-1")
        operator.see_cluster(world.kube.peek(RAYCLUSTERS, "math-1"), gone=False)
        await until(lambda: "submissionId" in world.status())
        world.submit("second")
        operator.see_job(world.kube.peek(RLHFJOBS, "second"), gone=False)
        await until(lambda: "second-1" in world.clusters())

    play(world, scenario)


def test_a_cluster_that_goes_is_heard_of_and_a_job_that_goes_is_forgotten(world):
    async def scenario(operator):
        operator.start()
        await until(lambda: world.clusters() == ["math-1"])
        world.set_cluster("math-1", ready=1)
        operator.see_cluster(world.kube.peek(RAYCLUSTERS, "math-1"), gone=False)
        await until(lambda: world.condition("ClusterReady")[1] == "WaitingForPods")
        gone = world.kube.peek(RAYCLUSTERS, "math-1")
        world.kube.remove(RAYCLUSTERS, "math-1")
        operator.see_cluster(gone, gone=True)
        await until(lambda: "failures" in world.status() and world.status()["failures"])
        operator.see_job(world.kube.peek(RLHFJOBS, "math"), gone=True)
        assert operator.store.keys == []

    play(world, scenario)


def test_without_kuberay_it_goes_on(world):
    listed = world.kube.list

    def without_kuberay(resource, *arguments, **options):
        if resource == RAYCLUSTERS:
            raise NotFoundError(404, "NotFound", "no such kind")
        return listed(resource, *arguments, **options)

    world.kube.list = without_kuberay

    async def scenario(operator):
        await operator.resync()
        assert operator.store.keys == [(NAMESPACE, "math")]

    play(world, scenario)


def test_a_namespace_that_cannot_be_listed_hinders_no_other(world):
    world.kube.put(RLHFJOBS, job_manifest("other"), "elsewhere")
    listed, calls = world.kube.list, []

    def one_is_gone(resource, namespace, *how):
        calls.append(namespace)
        if namespace == "gone":
            raise ForbiddenError(403, "Forbidden", "no such right")
        return listed(resource, namespace, *how)

    world.kube.list = one_is_gone

    async def scenario(operator):
        await operator.resync()
        assert sorted(operator.store.keys) == [("elsewhere", "other"), (NAMESPACE, "math")]
        gone = {"metadata": {**world.kube.peek(RLHFJOBS, "math")["metadata"], "namespace": "gone"}}
        before = len(operator.queue)
        operator.see_job({**world.kube.peek(RLHFJOBS, "math"), **gone}, gone=False)
        assert len(operator.queue) == before, "decided before its clusters were listed"

    play(world, scenario, namespaces=("gone", NAMESPACE, "elsewhere"))

    async def none_left(operator):
        with pytest.raises(ForbiddenError):
            await operator.resync()

    play(world, none_left, namespaces=("gone",))


def test_a_list_of_one_namespace_takes_no_job_of_another_for_gone(world):
    world.kube.put(RLHFJOBS, job_manifest("other"), "elsewhere")

    async def scenario(operator):
        await operator.resync()
        news = []
        operator.queue.add = lambda key, delay=0.0: news.append(key) if not delay else None
        await operator.resync()
        assert news == []

    play(world, scenario, namespaces=(NAMESPACE, "elsewhere"))


def test_where_nothing_is_worked_on_any_more_no_resync_makes_it_look_healthy(world, caplog):
    async def scenario(operator):
        async def die():
            raise ValueError("boom")

        operator.queue.run = die
        operator.start()
        await until(lambda: operator._worker.done())
        with pytest.raises(RuntimeError, match="worker has died"):
            await operator.resync()

    play(world, scenario)
    assert "boom" in caplog.text


def test_kopf_is_given_nothing_that_would_write_to_an_object(world):
    async def scenario(operator):
        registry = registry_of(operator)
        assert not list(registry._changing.get_all_handlers())
        assert not list(registry._spawning.get_all_handlers())
        assert len(list(registry._watching.get_all_handlers())) == 2
        settings = kopf.OperatorSettings()
        for handler in registry._activities.get_all_handlers():
            if handler.activity.value == "startup":
                await handler.fn(settings=settings)
        assert settings.peering.standalone
        assert not settings.posting.enabled
        assert settings.watching.client_timeout

    play(world, scenario)


def test_health_is_the_age_of_the_last_resync():
    now = [0.0]
    health = Health(90, lambda: now[0])
    now[0] = 119
    assert health.alive, "the first resync has its time"
    health.resynced()
    now[0] += 90
    assert health.alive
    now[0] += 1
    assert not health.alive
    port = health.serve(0)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz")
    health.resynced()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_probes_and_prometheus_come_by_ipv4_and_by_ipv6(address):
    if address == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    for port, path in ((Health(90).serve(0), "healthz"), (Metrics().serve(0), "metrics")):
        with urllib.request.urlopen(f"http://{address}:{port}/{path}") as answer:
            assert answer.status == 200
