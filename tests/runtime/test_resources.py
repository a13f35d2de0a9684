import logging

import pytest
from rlhf_api.runtime_config import LocalNode
from rlhf_runtime.errors import PlacementError
from rlhf_runtime.single_controller import RayClassWithInitArgs, RayResourcePool, Worker, create_colocated_worker_cls
from rlhf_runtime.single_controller.environment import LOCAL_NODE, allowed
from rlhf_runtime.single_controller.local_cluster import NodeArguments, device_shares, worker_environment
from rlhf_runtime.single_controller.resource_pool import check_together
from rlhf_runtime.workers.reward import RewardWorker
from rlhf_runtime.workers.rollout import RolloutWorker

NODES = {"n1": {"CPU": 2.0, "GPU": 1.0}, "n2": {"CPU": 2.0, "GPU": 1.0}}


@pytest.mark.parametrize(
    ("workers", "bundle", "strategy", "words"),
    [
        (
            4,
            {"CPU": 1, "GPU": 1},
            "PACK",
            ["4 bundles of {CPU: 1, GPU: 1} under PACK", "n1 ({CPU: 2, GPU: 1}) room for 1"],
        ),
        (2, {"GPU": 1}, "STRICT_PACK", ["2 bundles of {GPU: 1} under STRICT_PACK (all on one node)", "room for 1"]),
        (3, {"CPU": 1}, "STRICT_SPREAD", ["3 bundles", "each on a node of its own", "room for 2"]),
        (1, {"tpu": 1}, "SPREAD", ["1 bundle of {tpu: 1}", "n2 ({tpu: 0}) room for 0"]),
    ],
)
def test_a_group_that_never_fits_is_told_with_need_and_have(workers, bundle, strategy, words: list[str]) -> None:
    with pytest.raises(PlacementError) as error:
        RayResourcePool("actor", workers, bundle, strategy).check(NODES)
    for word in ["placement group `actor`: got", "Fix:", *words]:
        assert word in str(error.value)


def test_groups_that_fit_alone_but_not_together_are_told_so() -> None:
    actor, critic = (RayResourcePool(name, 2, {"GPU": 1.0}, "PACK") for name in ("actor", "critic"))
    check_together([actor], NODES)
    with pytest.raises(PlacementError, match=r"`actor` .*`critic` .*got 2 GPU .*expected 4"):
        check_together([actor, critic], NODES)


def test_groups_on_nodes_of_their_own_do_not_compete() -> None:
    nodes = {"n1": {"CPU": 2.0, "a": 2.0}, "n2": {"CPU": 2.0, "b": 2.0}}
    pools = [RayResourcePool(name, 2, {"CPU": 1.0, name: 1.0}, "PACK") for name in ("a", "b")]
    check_together(pools, nodes)
    more = RayResourcePool("more", 1, {"CPU": 1.0, "a": 0.001}, "PACK")
    with pytest.raises(PlacementError, match=r"`a` .*`more` .*got 2 CPU on the 1 node\(s\) .*expected 3"):
        check_together([*pools, more], nodes)


def test_a_strategy_that_never_fits_is_given_up_saying_so(caplog: pytest.LogCaptureFixture) -> None:
    pool = RayResourcePool("actor", 2, {"GPU": 1}, "STRICT_PACK", ["STRICT_SPREAD", "PACK"])
    with caplog.at_level(logging.WARNING):
        pool.check(NODES)
    assert pool.strategy == "STRICT_SPREAD"
    assert caplog.messages == [
        "Placement group actor: not STRICT_PACK (room for 1 of 2 bundles on all nodes), trying STRICT_SPREAD"
    ]


def test_a_strategy_that_fits_is_kept_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    pool = RayResourcePool("actor", 2, {"GPU": 1}, "PACK", ["STRICT_PACK", "SPREAD"])
    pool.check(NODES)
    assert pool.strategy == "PACK"
    assert caplog.messages == []


def test_a_group_that_fits_under_no_strategy_is_refused_naming_all() -> None:
    pool = RayResourcePool("actor", 3, {"GPU": 1}, "STRICT_PACK", ["PACK"])
    with pytest.raises(PlacementError, match=r"under STRICT_PACK \(all on one node\), else under PACK \(on as few"):
        pool.check(NODES)


def test_a_local_node_offers_its_resources_and_nothing_detected() -> None:
    node = LocalNode(pool="train", device="cuda", resources={"CPU": 1.5, "GPU": 2.0, "pool-train": 1.0})
    assert NodeArguments.of(node) == NodeArguments(2, 2, {"pool-train": 1}, "cuda")
    assert NodeArguments.of(LocalNode(pool="bare", device="cpu", resources={})) == NodeArguments(0, 0, {}, "cpu")


def test_local_nodes_share_out_the_devices_of_the_machine() -> None:
    nodes = [NodeArguments(1, gpus, {}, "cuda") for gpus in (2, 0, 1)]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in device_shares(nodes, None)] == ["0,1", "", "2"]
    assert [share["CUDA_VISIBLE_DEVICES"] for share in device_shares(nodes, "4,6,7")] == ["4,6", "", "7"]


@pytest.mark.parametrize("visible", [None, "", "5"])
def test_made_up_gpus_take_none_of_the_real_ones(visible: str | None) -> None:
    nodes = [NodeArguments(1, 2, {}, "cpu"), NodeArguments(1, 1, {}, "cuda")]
    made_up, real = (share["CUDA_VISIBLE_DEVICES"] for share in device_shares(nodes, visible))
    assert len(made_up.split(",")) == 2
    assert real == ("0" if visible is None else visible)


def test_secrets_stay_with_the_driver() -> None:
    environment = dict.fromkeys(("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", "TMPDIR"), "x")
    environment |= dict.fromkeys(("RAY_TMPDIR", "VIRTUAL_ENV", "LANG", "UV_CACHE_DIR", "CUDA_VISIBLE_DEVICES"), "x")
    secrets = dict.fromkeys(("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "UV_INDEX_PASSWORD"), "x")
    tuning = dict.fromkeys(("NCCL_DEBUG", "HF_HUB_OFFLINE", "OMP_PROC_BIND"), "x")
    engine = {"VLLM_LOGGING_LEVEL": "x"}
    everything = environment | secrets | tuning | engine

    assert allowed(everything, LOCAL_NODE) == environment
    assert allowed(everything, RewardWorker.env_allow_list) == tuning
    assert allowed(everything, RolloutWorker.env_allow_list) == tuning | engine


def test_roles_of_one_process_let_through_what_each_of_them_does() -> None:
    class First(Worker):
        env_allow_list = ("A_*", "B")

    class Second(Worker):
        env_allow_list = ("B", "C")

    init = create_colocated_worker_cls({"first": RayClassWithInitArgs(First), "second": RayClassWithInitArgs(Second)})
    assert init.cls.env_allow_list == ("A_*", "B", "C")


def test_python_path_goes_before_the_inherited_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    assert worker_environment(["/a", "/b"]) == {"PYTHONPATH": "/a:/b:/inherited"}
    monkeypatch.delenv("PYTHONPATH")
    assert worker_environment(["/a"]) == {"PYTHONPATH": "/a"}
    assert worker_environment([]) == {}
