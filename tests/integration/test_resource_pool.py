"""Placement groups and local nodes on a real Ray of two local nodes with fake GPUs, without any worker."""

import os
import signal
import sys

import pytest
import ray
from ray.util.placement_group import placement_group_table
from rlhf_api.runtime_config import LocalNode, WorkerGroup
from rlhf_runtime.errors import PlacementError
from rlhf_runtime.single_controller import LocalCluster, RayResourcePool, ResourcePoolManager, reserve


def test_a_cluster_leaves_the_devices_of_this_process_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with LocalCluster([LocalNode(pool="cpu", device="cpu", resources={"CPU": 1.0})]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_local_nodes_are_nodes_to_strategies_and_have_devices_of_their_own(pool: RayResourcePool) -> None:
    assert len(set(pool.bundle_nodes)) == 2
    assert [sorted({"a", "b"} & node["Resources"].keys()) for node in ray.nodes()] in ([["a"], ["b"]], [["b"], ["a"]])
    assert {node["Resources"]["CPU"] for node in ray.nodes()} == {1.0}


def live_placement_groups() -> set[str]:
    return {table["name"] for table in placement_group_table().values() if table["state"] != "REMOVED"}


@pytest.mark.parametrize(
    ("workers", "bundle", "strategy", "need"),
    [
        (3, {"CPU": 1.0}, "PACK", "3 bundles of {CPU: 1} under PACK"),
        (3, {"GPU": 1.0}, "STRICT_PACK", "3 bundles of {GPU: 1} under STRICT_PACK"),
        (3, {"CPU": 0.1}, "STRICT_SPREAD", "3 bundles of {CPU: 0.1} under STRICT_SPREAD"),
        (1, {"tpu": 1.0}, "PACK", "1 bundle of {tpu: 1} under PACK"),
    ],
)
def test_a_group_that_never_fits_is_refused_before_it_is_made(
    pool: RayResourcePool, workers: int, bundle: dict[str, float], strategy: str, need: str
) -> None:
    known = set(placement_group_table())
    with pytest.raises(PlacementError) as error:
        reserve([RayResourcePool("critic", workers, bundle, strategy)], 600)
    assert "placement group `critic`: got " in str(error.value)
    assert need in str(error.value)
    assert set(placement_group_table()) == known


def worker_group(name: str, roles: list[str], workers: int, cpus: float) -> WorkerGroup:
    return WorkerGroup.model_validate(
        {"name": name, "roles": roles, "workers": workers, "device": "cpu", "gpus_per_worker": 0.0}
        | {"bundle": {"CPU": cpus}, "strategy": "PACK", "fallback": []}
    )


def test_a_busy_cluster_is_waited_for_in_vain_once_and_nothing_is_left(pool: RayResourcePool) -> None:
    manager = ResourcePoolManager([worker_group("a", ["policy"], 1, 0.5), worker_group("b", ["reward"], 1, 1.0)], 1.0)
    known = live_placement_groups()
    with pytest.raises(PlacementError, match=r"`b`: got \{CPU: .*free .*expected room for 1 bundle of \{CPU: 1\}"):
        manager.create()
    assert live_placement_groups() == known


def test_pools_that_do_not_fit_together_are_refused_before_they_are_made(pool: RayResourcePool) -> None:
    known = set(placement_group_table())
    manager = ResourcePoolManager([worker_group("a", ["policy"], 2, 1.0), worker_group("b", ["reward"], 1, 1.0)], 600.0)
    with pytest.raises(PlacementError, match=r"got 2 CPU on the 2 node\(s\) that they share; expected 3"):
        manager.create()
    assert set(placement_group_table()) == known


def test_the_pools_of_a_job_are_had_by_name(pool: RayResourcePool) -> None:
    manager = ResourcePoolManager([worker_group("a", ["policy", "critic"], 1, 0.1)], 30.0)
    known = live_placement_groups()
    manager.create()
    assert live_placement_groups() == known | {"a"}
    assert len(manager.pools["a"].bundle_nodes) == 1
    manager.pools["a"].remove()
    assert live_placement_groups() == known


@pytest.mark.parametrize(
    ("workers", "bundle", "strategies", "nodes", "given_up"),
    [
        (3, {"CPU": 0.01}, ["STRICT_SPREAD", "SPREAD"], {1, 2}, "STRICT_SPREAD (room for 2 of 3 bundles on all nodes)"),
        # Each node has two GPUs, of which `pool` holds one.
        (2, {"GPU": 1.0}, ["STRICT_PACK", "PACK"], {2}, "STRICT_PACK ({GPU: 2} free in the whole cluster after 1 s)"),
        (2, {"CPU": 0.01}, ["STRICT_PACK", "PACK"], {1}, None),
    ],
)
def test_the_first_strategy_that_can_be_had_is_taken_saying_so(
    pool: RayResourcePool,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    bundle: dict[str, float],
    strategies: list[str],
    nodes: set[int],
    given_up: str | None,
) -> None:
    known = live_placement_groups()
    wanted = RayResourcePool("wanted", workers, bundle, strategies[0], strategies[1:])
    reserve([wanted], 2.0)
    try:
        assert len(set(wanted.bundle_nodes)) in nodes
        assert wanted.strategy == strategies[0 if given_up is None else 1]
        assert live_placement_groups() == known | {"wanted"}
        said = [f"Placement group wanted: not {given_up}, trying {strategies[1]}"] if given_up else []
        assert [record.message for record in caplog.records if "wanted" in record.message] == said
    finally:
        wanted.remove()


def test_when_no_strategy_can_be_had_each_is_told(pool: RayResourcePool) -> None:
    known = live_placement_groups()
    with pytest.raises(PlacementError) as error:
        reserve([RayResourcePool("wanted", 2, {"GPU": 2.0}, "STRICT_PACK", ["SPREAD", "PACK"])], 2.0)
    for word in ["STRICT_PACK: room for 1 of 2 bundles", "; SPREAD: {GPU: 2} free", "; PACK: {GPU: 2} free"]:
        assert word in str(error.value)
    assert live_placement_groups() == known


def test_ray_does_not_handle_sigterm_even_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    during = []

    def init(**options: object) -> None:
        ray._private.utils.set_sigterm_handler(lambda signum, frame: sys.exit(signum))  # as ray.init does
        during.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(ray, "init", init)
    before = signal.getsignal(signal.SIGTERM)
    LocalCluster(None).start()
    assert during == [before]
