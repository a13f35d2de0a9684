import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_api import RLHFJob, RuntimeConfig, SpecError
from rlhf_operator.defaults import apply_defaults
from rlhf_operator.plan import Plan, build_plan
from rlhf_operator.validate import validate

ROLES = ["policy", "rollout", "critic", "reference", "reward"]


def errors_of(manifest):
    with pytest.raises(SpecError) as caught:
        build_plan(RLHFJob.parse(manifest), "runs/job")
    return [str(error) for error in caught.value.errors]


def placed(manifest, pools, groups):
    """`manifest` with these pools and groups."""
    manifest["spec"]["nodePools"] = pools
    manifest["spec"]["placement"] = {"groups": groups}
    return manifest


def test_defaults_follow_from_other_fields(manifest):
    manifest["spec"]["data"]["batchSize"] = 8
    manifest["spec"]["rollout"] = {"samplesPerPrompt": 4}
    manifest["spec"]["training"]["optimizer"] = {"learningRate": 0.5}
    manifest["spec"]["nodePools"] = [{"name": "gpus", "gpusPerNode": 2}, {"name": "cpus"}]
    spec = apply_defaults(RLHFJob.parse(manifest)).spec
    assert spec.models.critic == spec.models.policy
    assert spec.models.reference.random == spec.models.policy.random
    assert spec.training.critic_optimizer.learning_rate == 0.5
    assert spec.algorithm.ppo.mini_batch_size == 32
    assert [pool.device for pool in spec.node_pools] == ["cuda", "cpu"]
    [group] = spec.placement.groups
    assert (group.name, group.pool, sorted(group.roles), group.workers) == ("all", "gpus", sorted(ROLES), 2)
    assert (group.strategy, group.gpus_per_worker) == ("PACK", 1.0)


def test_an_evaluation_generates_as_many_tokens_as_training(manifest):
    evaluation = {"prompts": {"builtin": "arithmetic"}}
    manifest["spec"]["data"] |= {"maxResponseLength": 7, "evaluation": evaluation}
    assert apply_defaults(RLHFJob.parse(manifest)).spec.data.evaluation.max_response_length == 7
    evaluation["maxResponseLength"] = 9
    assert apply_defaults(RLHFJob.parse(manifest)).spec.data.evaluation.max_response_length == 9


def test_what_is_given_is_not_replaced(manifest):
    spec = manifest["spec"]
    spec["models"] |= {"critic": {"path": "/c"}, "reference": {"path": "/r"}}
    spec["training"]["criticOptimizer"] = {"learningRate": 0.25}
    spec["algorithm"]["ppo"]["miniBatchSize"] = 7
    placed(manifest, [{"name": "p", "gpusPerNode": 4, "device": "cpu"}], [
        {"name": "g", "pool": "p", "roles": ROLES, "gpusPerWorker": 0, "strategy": "SPREAD"}
    ])  # fmt: skip
    full = apply_defaults(RLHFJob.parse(manifest)).spec
    assert (full.models.critic.path, full.models.reference.path) == ("/c", "/r")
    assert full.training.critic_optimizer.learning_rate == 0.25
    assert full.algorithm.ppo.mini_batch_size == 7
    assert full.node_pools[0].device == "cpu"
    assert (full.placement.groups[0].gpus_per_worker, full.placement.groups[0].strategy) == (0, "SPREAD")


@pytest.mark.parametrize(
    ("algorithm", "roles"),
    [
        ({"ppo": {}}, ROLES),
        ({"ppo": {"kl": {"coefficient": 0}}}, ["policy", "rollout", "critic", "reward"]),
        ({"grpo": {}}, ["policy", "rollout", "reference", "reward"]),
        ({"rloo": {"kl": {"coefficient": 0}}}, ["policy", "rollout", "reward"]),
        ({"reinforcePlusPlus": {}}, ["policy", "rollout", "reference", "reward"]),
    ],
)
def test_only_roles_that_the_algorithm_needs_are_placed(manifest, algorithm, roles):
    manifest["spec"] |= {"algorithm": algorithm, "rollout": {"samplesPerPrompt": 2}}
    config = build_plan(RLHFJob.parse(manifest), "runs/job").config
    assert config.groups[0].roles == roles
    assert set(config.models.by_role) == {"policy", "critic", "reference"}.intersection(roles)
    assert (config.training.critic_optimizer is not None) == ("critic" in roles)
    assert RuntimeConfig.parse(json.loads(config.model_dump_json(by_alias=True))) == config


def test_a_reference_may_watch_a_job_that_does_not_need_it(manifest):
    manifest["spec"]["algorithm"] = {"ppo": {"kl": {"coefficient": 0}}}
    config = build_plan(
        RLHFJob.parse(placed(manifest, [{"name": "p"}], [{"name": "g", "pool": "p", "roles": ROLES}])), "x"
    ).config
    assert config.models.reference == config.models.policy


@pytest.mark.parametrize(
    ("settings", "constant"), [({}, 64 * 256), ({"miniBatchSize": 4}, 4 * 256), ({"lossConstant": 7}, 7)]
)
def test_the_constant_of_a_loss_is_that_of_dr_grpo(manifest, settings, constant):
    manifest["spec"]["algorithm"] = {"ppo": {"lossAggregation": "constant", **settings}}
    full = apply_defaults(RLHFJob.parse(manifest))
    assert full.spec.algorithm.ppo.loss_constant == constant
    assert apply_defaults(full) == full


def test_how_models_compute_reaches_the_runtime(manifest):
    assert build_plan(RLHFJob.parse(manifest), "runs/job").config.training.dtype == "float32"
    manifest["spec"]["training"] |= {"dtype": "bfloat16", "activationCheckpointing": True}
    training = build_plan(RLHFJob.parse(manifest), "runs/job").config.training
    assert (training.dtype, training.activation_checkpointing) == ("bfloat16", True)


def test_placement_left_out_is_one_group_and_says_so(manifest):
    plan = build_plan(RLHFJob.parse(manifest), "runs/job")
    assert [group.group.name for group in plan.groups] == ["all"]
    roles = "policy, rollout, critic, reference, reward"
    assert f"placement was left out: {roles} are colocated in one group of 1 worker on pool `local`" in plan.notes


@pytest.mark.parametrize("pool", [{"nodes": 2, "gpusPerNode": 4}, {"gpusPerNode": 8, "device": "cpu"}])
def test_placement_left_out_uses_every_gpu_of_the_first_pool(manifest, pool):
    spec = manifest["spec"]
    spec["nodePools"], spec["rollout"] = [{"name": "p", **pool}, {"name": "q"}], {"tensorParallelSize": 2}
    plan = build_plan(RLHFJob.parse(manifest), "runs/job")
    assert (plan.config.groups[0].workers, plan.config.groups[0].gpus_per_worker, plan.config.engines) == (8, 1.0, 4)
    assert any("in one group of 8 workers on pool `p`" in note for note in plan.notes)


def test_what_is_wrong_with_a_placement_left_out_is_told_as_that(manifest):
    spec = manifest["spec"]
    spec["nodePools"], spec["rollout"] = [{"name": "p", "gpusPerNode": 8, "cpu": 4}], {"tensorParallelSize": 3}
    spec["algorithm"] = {"ppo": {"miniBatchSize": 6}}
    with pytest.raises(SpecError) as caught:
        build_plan(RLHFJob.parse(manifest), "runs/job")
    wrong = {error.path: error for error in caught.value.errors}
    group = "spec.placement.groups[0]"
    assert set(wrong) == {f"{group}.workers", "spec.algorithm.ppo.miniBatchSize", group}
    said = "; spec.placement was left out, which makes one group of 8 workers"
    assert all(error.fix.endswith(said) for error in wrong.values())


def test_bundles_count_processes(manifest):
    placed(manifest, [{"name": "p"}], [
        {"name": "actor", "pool": "p", "roles": ["policy", "reference", "rollout"], "workers": 2},
        {"name": "critic", "pool": "p", "roles": ["critic"]},
        {"name": "reward", "pool": "p", "roles": ["reward"], "workers": 3},
    ])  # fmt: skip
    plan = build_plan(RLHFJob.parse(manifest), "runs/job")
    assert {group.group.name: group.resources for group in plan.groups} == {
        "actor": {"CPU": 2.0, "pool-p": 0.001},
        "critic": {"CPU": 1.0, "pool-p": 0.001},
        "reward": {"CPU": 1.0, "pool-p": 0.001},
    }
    assert [node.resources for node in plan.config.local_nodes] == [{"CPU": 8.0, "pool-p": 1.0}]


def test_each_node_of_a_pool_becomes_a_local_node(manifest):
    placed(manifest, [{"name": "p", "nodes": 2, "cpu": "8500m", "gpusPerNode": 4, "device": "cpu"}, {"name": "q"}], [
        {"name": "all", "pool": "p", "roles": ROLES, "workers": 4}
    ])  # fmt: skip
    plan = build_plan(RLHFJob.parse(manifest), "runs/job")
    node = {"CPU": 8.0, "GPU": 4.0, "pool-p": 1.0}
    assert [(node.pool, node.resources) for node in plan.config.local_nodes] == [
        ("p", node), ("p", node), ("q", {"CPU": 0.0, "pool-q": 1.0})
    ]  # fmt: skip
    assert "no group uses pool `q`" in plan.notes


def test_fields_of_a_cluster_are_ignored_where_they_say_something(manifest):
    plain = {"suspend": False, "backoffLimit": 3, "head": {}, "env": []}
    given = {"rayVersion": "2.61.0", "suspend": True, "head": {"cpu": 2}, "env": [{"name": "A"}], "backoffLimit": 0}
    for fields, names in ((plain, []), (given, list(given))):
        manifest["spec"] |= fields
        notes = build_plan(RLHFJob.parse(manifest), "runs/job").notes
        ignored = {note.removesuffix(" is ignored on this machine") for note in notes if "ignored" in note}
        assert ignored == {f"spec.{name}" for name in names}


def test_what_this_machine_ignores_is_said(manifest):
    manifest["metadata"]["namespace"] = "team"
    manifest["spec"]["image"] = "image"
    manifest["spec"]["nodePools"][0] |= {
        "memory": "1Gi",
        "nodeSelector": {"a": "b"},
        "tolerations": [{"key": "gpu"}],
        "sharedMemory": 1,
    }
    notes = build_plan(RLHFJob.parse(manifest), "runs/job").notes
    ignored = ("metadata.namespace", "spec.image", *(f"spec.nodePools[0].{name}" for name in (
        "memory", "sharedMemory", "nodeSelector", "tolerations")))  # fmt: skip
    assert [note for note in notes if "ignored" in note] == [f"{name} is ignored on this machine" for name in ignored]


@pytest.mark.parametrize(
    ("pools", "group", "message"),
    [
        (
            [{"name": "p", "nodes": 2, "gpusPerNode": 8}],
            {"workers": 16, "strategy": "STRICT_PACK"},
            "spec.placement.groups[0]: got 16 bundles of 1 GPU with STRICT_PACK on one node; expected at most 8 "
            "(pool `p` has 2 nodes with 8 GPUs each). "
            "Fix: lower `workers`, or raise `gpusPerNode` of spec.nodePools[0]",
        ),
        (
            [{"name": "p", "nodes": 2, "gpusPerNode": 8}],
            {"workers": 3, "strategy": "STRICT_SPREAD"},
            "spec.placement.groups[0]: got 3 bundles of 1 GPU with STRICT_SPREAD, one a node; expected at most 2 "
            "(pool `p` has 2 nodes with 8 GPUs each). Fix: lower `workers`, or raise `nodes` of spec.nodePools[0]",
        ),
        (
            [{"name": "p", "nodes": 2, "gpusPerNode": 8}],
            {"workers": 17},
            "spec.placement.groups[0]: got 17 bundles of 1 GPU with PACK; expected at most 16 "
            "(pool `p` has 2 nodes with 8 GPUs each). "
            "Fix: lower `workers`, or raise `gpusPerNode` or `nodes` of spec.nodePools[0]",
        ),
        (
            [{"name": "p", "cpu": 5}],
            {"workers": 2},
            "spec.placement.groups[0]: got 2 bundles of 3 CPU with PACK; expected at most 1 "
            "(pool `p` has 1 node with 5 CPUs each). "
            "Fix: lower `workers`, or raise `cpu` or `nodes` of spec.nodePools[0]",
        ),
        (
            [{"name": "p"}],
            {"gpusPerWorker": 1},
            "spec.placement.groups[0]: got 1 bundle of 1 GPU with PACK; expected at most 0 "
            "(pool `p` has 1 node with 0 GPUs each). "
            "Fix: lower `gpusPerWorker`, or raise `gpusPerNode` of spec.nodePools[0]",
        ),
        (
            [{"name": "p", "gpusPerNode": 2, "device": "cpu"}],
            {"workers": 3, "gpusPerWorker": 0.6},
            "spec.placement.groups[0]: got 3 bundles of 0.6 GPU with PACK; expected at most 2 "
            "(pool `p` has 1 node with 2 GPUs each). "
            "Fix: lower `workers`, or raise `gpusPerNode` or `nodes` of spec.nodePools[0]",
        ),
    ],
)
def test_bundles_that_cannot_fit_are_refused_with_the_arithmetic(manifest, pools, group, message):
    placed(manifest, pools, [{"name": "all", "pool": "p", "roles": ROLES, **group}])
    assert errors_of(manifest) == [message]


def test_groups_of_a_pool_must_fit_together(manifest):
    pools = [{"name": "p", "nodes": 2, "gpusPerNode": 8}]
    actor = {"name": "actor", "pool": "p", "roles": ["policy", "rollout", "reference", "reward"], "workers": 8}
    critic = {"name": "critic", "pool": "p", "roles": ["critic"], "workers": 9}
    [error] = errors_of(placed(manifest, pools, [actor, critic]))
    assert "beside 9 of `critic`" in error
    assert error.startswith("spec.placement.groups[0]: got 8 bundles of 1 GPU")
    assert "expected at most 7 " in error


def test_groups_of_a_pool_share_its_cpus(manifest):
    pools = [{"name": "p", "cpu": 8}]
    actor = {"name": "actor", "pool": "p", "roles": ["policy", "rollout", "reference"], "workers": 3}
    rest = {"name": "rest", "pool": "p", "roles": ["critic", "reward"]}
    build_plan(RLHFJob.parse(placed(manifest, pools, [actor, rest])), "runs/job")
    [error] = errors_of(placed(manifest, pools, [actor, rest | {"workers": 2}]))
    assert "spec.placement.groups[1]: got 2 bundles of 2 CPU with PACK; expected at most 1 " in error


def test_the_group_that_is_hardest_to_place_comes_first(manifest):
    pools = [{"name": "p", "nodes": 2, "gpusPerNode": 8}]
    critic = {"name": "critic", "pool": "p", "roles": ["critic"], "workers": 8, "strategy": "SPREAD"}
    actor = {"name": "actor", "pool": "p", "roles": ["policy", "rollout", "reference", "reward"], "workers": 8}
    plan = build_plan(RLHFJob.parse(placed(manifest, pools, [critic, actor | {"strategy": "STRICT_PACK"}])), "runs/job")
    assert [group.group.name for group in plan.groups] == ["critic", "actor"]
    assert [group.name for group in plan.config.groups] == ["actor", "critic"]


def test_shares_of_a_gpu_are_shared_between_groups(manifest):
    pools = [{"name": "p", "gpusPerNode": 1}]
    actor = {"name": "actor", "pool": "p", "roles": ["policy", "rollout", "reference", "reward"], "gpusPerWorker": 0.7}
    critic = {"name": "critic", "pool": "p", "roles": ["critic"], "gpusPerWorker": 0.3}
    build_plan(RLHFJob.parse(placed(manifest, pools, [actor, critic])), "runs/job")
    [error] = errors_of(placed(manifest, pools, [actor, critic | {"gpusPerWorker": 0.4}]))
    assert "spec.placement.groups[1]: got 1 bundle of 0.4 GPU" in error


RICH: dict[str, Any] = {
    "apiVersion": "rlhf-operator.io/v1alpha1",
    "kind": "RLHFJob",
    "metadata": {"name": "rich", "labels": {"a": "b"}},
    "spec": {
        "image": "image",
        "models": {"policy": {"random": {"architecture": "qwen2", "config": {"a": 1}}}, "critic": {"path": "/c"}},
        "rewards": [
            {"name": "digits", "function": {"name": "digit_share"}},
            {"name": "mine", "weight": 0.5, "function": {"importPath": "a.b:c"}},
        ],
        "data": {"prompts": {"inline": ["1+1=", {"prompt": "2+2=", "answer": 4}]}, "batchSize": 4},
        "algorithm": {
            "ppo": {"clipRange": {"low": 0.1}, "kl": {"in": "loss", "estimator": "k3"}, "valueClipRange": None}
        },
        "rollout": {"samplesPerPrompt": 2, "temperature": 0.7, "tensorParallelSize": 2},
        "training": {"steps": 3, "optimizer": {"betas": [0.9, 0.95]}},
        "nodePools": [
            {"name": "train", "nodes": 2, "gpusPerNode": 2, "device": "cpu", "cpu": "16", "memory": "1Gi"},
            {"name": "cpu", "tolerations": [{"key": "a", "operator": "Exists"}]},
        ],
        "placement": {
            "strategy": "SPREAD",
            "groups": [
                {"name": "actor", "pool": "train", "roles": ["policy", "reference"], "workers": 2},
                {"name": "engines", "pool": "cpu", "roles": ["rollout"], "workers": 4},
                {
                    "name": "critic",
                    "pool": "train",
                    "roles": ["critic"],
                    "gpusPerWorker": 0.5,
                    "strategy": "STRICT_PACK",
                    "fallback": ["PACK"],
                },
                {"name": "reward", "pool": "cpu", "roles": ["reward"], "workers": 2},
            ],
        },
        "weightSync": {"method": "broadcast", "verify": "none", "timeoutSeconds": 30},
        "storage": [{"name": "models", "persistentVolumeClaim": "models", "mountPath": "/models"}],
        "code": {"configMap": "code"},
        "observability": {"tensorboard": False},
    },
}

values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.just(10**30),
    st.floats(),
    st.sampled_from(["", "a", "cpu", "cuda", "train", "policy", "STRICT_SPREAD", "/models/x", "0.5", "500m", "\ud800"]),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["a", "path", "name", 1]), st.integers(0, 3), max_size=2),
)


def plan_or_errors(manifest):
    try:
        return build_plan(RLHFJob.parse(manifest), "runs/job")
    except SpecError as error:
        return error.errors


def spots(node):
    """Every (container, key) below a node."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from spots(node[key])


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_change_of_a_manifest_is_planned_or_refused_with_paths(data):
    manifest = copy.deepcopy(RICH)
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(list(spots(manifest))))
        match data.draw(st.sampled_from(["replace", "delete", "add", "repeat"])):
            case "replace":
                container[key] = data.draw(values)
            case "delete":
                del container[key]
            case "add" if isinstance(container, dict):
                container[data.draw(st.sampled_from(["image", "strategy", "lora", "zzz", "device", "workers"]))] = 1
            case _ if isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
    outcome = plan_or_errors(manifest)
    if isinstance(outcome, Plan):
        assert validate(outcome.job) == []
        assert apply_defaults(outcome.job) == outcome.job
        assert RuntimeConfig.parse(json.loads(outcome.config.model_dump_json(by_alias=True))) == outcome.config
    else:
        assert outcome
        assert all(problem.path and problem.got and problem.expected and problem.fix for problem in outcome)


def test_the_rich_manifest_is_right_as_it_stands():
    plan = build_plan(RLHFJob.parse(copy.deepcopy(RICH)), "runs/rich")
    assert plan.config.algorithm.ppo.value_clip_range is None
    assert RuntimeConfig.parse(json.loads(plan.config.model_dump_json(by_alias=True))) == plan.config


def test_a_planner_of_another_release_is_told_apart_before_anything_else(manifest):
    document = json.loads(build_plan(RLHFJob.parse(manifest), "runs/job").config.model_dump_json(by_alias=True))
    with pytest.raises(SpecError) as caught:
        RuntimeConfig.parse(document | {"schemaVersion": 2, "name": None})
    assert [error.path for error in caught.value.errors] == ["schemaVersion"]
