from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_api import RLHFJob, SpecError
from rlhf_api.placement import capacity, room
from rlhf_operator.plan import build_plan

ROLES = ["policy", "rollout", "critic", "reference", "reward"]
ACTOR = {"name": "actor", "roles": ["policy", "critic", "reference", "reward"]}
ROLLOUT = {"name": "rollout", "roles": ["rollout"]}
STRATEGIES = ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def planned(manifest, pool, *groups, tensor_parallel=1):
    manifest["spec"]["nodePools"] = [{"name": "p", **pool}]
    manifest["spec"]["placement"] = {"groups": [{"name": "all", "pool": "p", "roles": ROLES, **g} for g in groups]}
    manifest["spec"]["rollout"] = {"tensorParallelSize": tensor_parallel}
    return build_plan(RLHFJob.parse(manifest), "runs/job")


def errors_of(*arguments, **options):
    with pytest.raises(SpecError) as caught:
        planned(*arguments, **options)
    return [str(error) for error in caught.value.errors]


@pytest.mark.parametrize(
    ("workers", "tensor_parallel", "engines", "bundle"),
    [
        (2, 1, 2, {"CPU": 1.0, "GPU": 1.0, "pool-p": 0.001}),
        (4, 2, 2, {"CPU": 2.0, "GPU": 2.0, "pool-p": 0.001}),
        (4, 4, 1, {"CPU": 4.0, "GPU": 4.0, "pool-p": 0.001}),
    ],
)
def test_an_engine_apart_is_a_bundle_with_its_devices(manifest, workers, tensor_parallel, engines, bundle):
    rollout = ROLLOUT | {"workers": workers}
    config = planned(manifest, {"gpusPerNode": 8}, ACTOR, rollout, tensor_parallel=tensor_parallel).config
    group = config.group_of("rollout")
    assert (config.engines, group.workers, group.gpus_per_worker) == (engines, engines, tensor_parallel)
    assert group.bundle == bundle


def test_an_engine_beside_training_roles_uses_neighbouring_bundles(manifest):
    config = planned(manifest, {"gpusPerNode": 8}, {"workers": 4}, tensor_parallel=2).config
    [group] = config.groups
    assert (config.engines, group.workers, group.gpus_per_worker) == (2, 4, 1)
    assert group.bundle == {"CPU": 3.0, "GPU": 1.0, "pool-p": 0.001}


def test_engines_on_cpus_have_a_cpu_a_device(manifest):
    config = planned(manifest, {}, ACTOR, ROLLOUT | {"workers": 4}, tensor_parallel=2).config
    assert config.group_of("rollout").bundle == {"CPU": 2.0, "pool-p": 0.001}
    assert config.local_nodes[0].resources["CPU"] == 2 + 4


@pytest.mark.parametrize(
    ("node", "unit", "field"), [({"gpusPerNode": 4}, "GPU", "gpusPerNode"), ({"cpu": 4}, "CPU", "cpu")]
)
def test_an_engine_larger_than_a_node_is_refused(manifest, node, unit, field):
    rollout, actor = ROLLOUT | {"workers": 8}, ACTOR | {"strategy": "SPREAD"}
    assert errors_of(manifest, {"nodes": 2, **node}, actor, rollout, tensor_parallel=8) == [
        f"spec.placement.groups[1]: got 1 bundle of 8 {unit} with PACK; expected at most 0 (pool `p` has 2 nodes with "
        f"4 {unit}s each). Fix: lower spec.rollout.tensorParallelSize, or raise `{field}` of spec.nodePools[0]"
    ]


@pytest.mark.parametrize(
    ("nodes", "gpus", "group", "got"),
    [
        (1, 6, {"workers": 4, "strategy": "SPREAD"}, None),
        (2, 4, {"workers": 8}, None),
        (2, 6, {"workers": 8}, "PACK over 2 nodes, one with room for 6 bundles"),
        (2, 6, {"workers": 4}, None),
        (2, 6, {"workers": 4, "strategy": "STRICT_PACK", "fallback": ["SPREAD", "PACK"]}, "SPREAD over 2 nodes"),
        (2, 3, {"workers": 4, "fallback": ["SPREAD"]}, "PACK and SPREAD over 2 nodes, one with room for 3 bundles"),
        (4, 4, {"workers": 4, "strategy": "STRICT_SPREAD"}, "STRICT_SPREAD over 4 nodes"),
    ],
)
def test_an_engine_is_never_torn_apart(manifest, nodes, gpus, group, got):
    pool = {"nodes": nodes, "gpusPerNode": gpus, "cpu": 100}
    if got is None:
        planned(manifest, pool, group, tensor_parallel=4)
    else:
        assert errors_of(manifest, pool, group, tensor_parallel=4) == [
            f"spec.placement.groups[0]: got {got}; expected the 4 neighbouring bundles of an engine "
            "(tensorParallelSize) on one node. Fix: use STRICT_PACK, or give the rollout a group of its own"
        ]


def test_another_group_on_the_pool_may_leave_an_odd_place(manifest):
    actor = {"name": "actor", "roles": ["policy", "rollout", "reference", "reward"], "workers": 6}
    critic = {"name": "critic", "roles": ["critic"], "strategy": "STRICT_PACK"}
    [error] = errors_of(manifest, {"nodes": 2, "gpusPerNode": 4}, actor, critic, tensor_parallel=2)
    assert error.startswith("spec.placement.groups[0]: got PACK over 2 nodes, one with room for 3 bundles")


@pytest.mark.parametrize(
    ("workers", "strategies", "taken", "notes"),
    [
        (8, ["STRICT_PACK", "PACK", "SPREAD"], ["STRICT_PACK", "PACK", "SPREAD"], []),
        (
            16,
            ["STRICT_PACK", "PACK", "SPREAD"],
            ["PACK", "SPREAD"],
            [
                "group `all` falls back to PACK: at most 8 fit of 16 bundles of 1 GPU with STRICT_PACK on one node "
                "(pool `p` has 2 nodes with 8 GPUs each)"
            ],
        ),
        (
            3,
            ["STRICT_SPREAD", "SPREAD"],
            ["SPREAD"],
            [
                "group `all` falls back to SPREAD: at most 2 fit of 3 bundles of 1 GPU with STRICT_SPREAD, one a node "
                "(pool `p` has 2 nodes with 8 GPUs each)"
            ],
        ),
    ],
)
def test_the_first_strategy_that_fits_is_taken(manifest, workers, strategies, taken, notes):
    group = {"workers": workers, "strategy": strategies[0], "fallback": strategies[1:]}
    plan = planned(manifest, {"nodes": 2, "gpusPerNode": 8}, group)
    [made] = plan.config.groups
    assert [made.strategy, *made.fallback] == taken
    assert list(plan.notes) == notes
    assert plan.job.spec.placement.groups[0].fallback == strategies[1:]


def test_no_strategy_that_fits_tells_of_all(manifest):
    group = {"workers": 17, "strategy": "STRICT_PACK", "fallback": ["STRICT_SPREAD", "PACK"]}
    assert errors_of(manifest, {"nodes": 2, "gpusPerNode": 8}, group) == [
        "spec.placement.groups[0]: got 17 bundles of 1 GPU with STRICT_PACK on one node or STRICT_SPREAD, one a node "
        "or PACK; expected at most 8 or 2 or 16 (pool `p` has 2 nodes with 8 GPUs each). Fix: lower `workers`, or "
        "raise `gpusPerNode` or `nodes` of spec.nodePools[0]"
    ]


def test_a_fallback_is_taken_beside_groups_that_are_harder_to_place(manifest):
    actor = {"name": "actor", "roles": ["policy", "rollout", "reference", "reward"], "workers": 6}
    critic = {"name": "critic", "roles": ["critic"], "workers": 4, "strategy": "STRICT_SPREAD", "fallback": ["PACK"]}
    plan = planned(manifest, {"nodes": 4, "gpusPerNode": 6}, critic, actor | {"strategy": "STRICT_PACK"})
    assert plan.notes == (
        "group `critic` falls back to PACK: at most 3 fit of 4 bundles of 1 GPU with STRICT_SPREAD, one a node "
        "(pool `p` has 4 nodes with 6 GPUs each, beside 6 of `actor`)",
    )


def test_groups_are_placed_in_the_order_of_the_strategies_they_got(manifest):
    fell = {"name": "actor", "roles": ["policy", "rollout", "reference", "reward"], "workers": 5}
    fell |= {"strategy": "STRICT_PACK", "fallback": ["SPREAD"]}
    critic = {"name": "critic", "roles": ["critic"], "workers": 2, "strategy": "STRICT_SPREAD"}
    plan = planned(manifest, {"nodes": 2, "gpusPerNode": 4}, fell, critic)
    assert [group.name for group in plan.config.groups] == ["critic", "actor"]


@st.composite
def jobs(draw):
    """Pools and groups of a job of two or three groups."""
    pools = [
        {
            "name": name,
            "nodes": draw(st.integers(1, 3)),
            "gpusPerNode": draw(st.sampled_from([0, 4, 8])),
            "device": draw(st.sampled_from(["cpu", "cpu", "cuda"])),
        }
        | draw(st.sampled_from([{}, {"cpu": 16}]))
        for name in ("p", "q")
    ]
    places = {role: draw(st.integers(0, 2)) for role in ROLES}
    groups = []
    for place in sorted(set(places.values())):
        strategies = draw(st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=3, unique=True))
        groups.append({
            "name": f"g{place}",
            "pool": draw(st.sampled_from("ppq")),
            "roles": [role for role in ROLES if places[role] == place],
            "workers": draw(st.sampled_from([1, 2, 4, 4])),
            "strategy": strategies[0],
            "fallback": strategies[1:],
        })  # fmt: skip
    return pools, groups, draw(st.sampled_from([1, 2, 2, 4]))


@settings(max_examples=400, deadline=None)
@given(jobs())
def test_an_accepted_plan_never_needs_more_than_the_pools_have(job):
    pools, groups, tensor_parallel = job
    manifest = {
        "apiVersion": "rlhf-operator.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": "job"},
        "spec": {
            "models": {"policy": {"path": "/m"}},
            "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
            "data": {"prompts": {"builtin": "arithmetic"}},
            "algorithm": {"ppo": {}},
            "training": {"steps": 3},
            "rollout": {"tensorParallelSize": tensor_parallel},
            "nodePools": pools,
            "placement": {"groups": groups},
        },
    }
    try:
        config = build_plan(RLHFJob.parse(manifest), "runs/job").config
    except SpecError:
        return
    need, have = Counter(), Counter()
    for group in config.groups:
        nodes = [node.resources for node in config.local_nodes if f"pool-{node.pool}" in group.bundle]
        assert room([capacity(node, group.bundle) for node in nodes], group.strategy) >= group.workers
        for key, amount in group.bundle.items():
            need[group.device, key] += amount * group.workers
    for node in config.local_nodes:
        for key, amount in node.resources.items():
            have[node.device, key] += amount
    assert all(need[key] <= have[key] + 1e-6 for key in need)
    [written] = [group for group in groups if "rollout" in group["roles"]]
    rollout = config.group_of("rollout")
    assert config.engines * tensor_parallel == written["workers"]
    assert rollout.workers * max(rollout.gpus_per_worker, 1) == written["workers"] or rollout.device == "cpu"
    assert config.weight_sync.transport in {"cpu": ("gloo", "shm"), "cuda": ("nccl", "ipc")}[rollout.device]
