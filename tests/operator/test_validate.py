import pytest
from rlhf_api import RLHFJob
from rlhf_operator.defaults import apply_defaults
from rlhf_operator.validate import CHECKS, validate

ALL = ["policy", "rollout", "critic", "reference", "reward"]


def problems(manifest):
    return {error.path: error for error in validate(apply_defaults(RLHFJob.parse(manifest)))}


def grouped(manifest, *groups, **pool):
    manifest["spec"]["nodePools"] = [{"name": "p", **pool}]
    manifest["spec"]["placement"] = {
        "groups": [{"name": f"g{i}", "pool": "p", **group} for i, group in enumerate(groups)]
    }
    return manifest


def test_a_right_job_has_no_problem(manifest):
    assert problems(manifest) == {}


@pytest.mark.parametrize(
    ("section", "entries", "path"),
    [
        ("nodePools", [{"name": "a"}, {"name": "b"}, {"name": "a"}], "spec.nodePools[2].name"),
        ("rewards", [{"name": "a", "function": {"name": "digit_share"}}] * 2, "spec.rewards[1].name"),
        (
            "storage",
            [{"name": "a", "persistentVolumeClaim": "a", "mountPath": path} for path in ("/a", "/b")],
            "spec.storage[1].name",
        ),
        (
            "storage",
            [{"name": path[1:2], "persistentVolumeClaim": "a", "mountPath": path} for path in ("/a", "/b/../a/")],
            "spec.storage[1].mountPath",
        ),
    ],
)  # fmt: skip
def test_names_are_unique(manifest, section, entries, path):
    manifest["spec"][section] = entries
    assert list(problems(manifest)) == [path]


def test_group_names_are_unique(manifest):
    grouped(manifest, {"roles": ALL[:4]}, {"roles": ["reward"], "name": "g0"})
    assert "spec.placement.groups[0].name" in problems(manifest)["spec.placement.groups[1].name"].expected


def test_a_group_needs_a_pool_that_exists(manifest):
    grouped(manifest, {"roles": ALL, "pool": "q"})
    error = problems(manifest)["spec.placement.groups[0].pool"]
    assert (error.got, error.expected) == ("`q`", "one of p")


@pytest.mark.parametrize(
    ("bounds", "right"),
    [({}, True), ({"minNodes": 2, "maxNodes": 2}, True), ({"maxNodes": 3}, False), ({"minNodes": 1}, False)],
)
def test_only_pools_of_rollouts_scale(manifest, bounds, right):
    grouped(manifest, {"roles": ["policy", "critic", "reference"]}, {"roles": ["reward", "rollout"], "pool": "r"})
    manifest["spec"]["nodePools"] += [{"name": "r", "nodes": 2, **bounds}]
    assert list(problems(manifest)) == ([] if right else ["spec.nodePools[1]"])
    groups = manifest["spec"]["placement"]["groups"]
    groups[1]["roles"].remove("reward")
    groups[0]["roles"].append("reward")
    assert problems(manifest) == {}


def test_a_pool_that_scales_cannot_be_the_one_of_a_job_without_placement(manifest):
    manifest["spec"]["nodePools"][0]["maxNodes"] = 2
    assert "group `all`" in problems(manifest)["spec.nodePools[0]"].got


def test_variables_have_one_value_each(manifest):
    twice = [{"name": "A", "value": "1"}, {"name": "A"}]
    manifest["spec"] |= {"env": twice, "head": {"env": twice}}
    manifest["spec"]["nodePools"][0]["env"] = twice
    assert set(problems(manifest)) == {
        "spec.env[1].name", "spec.head.env[1].name", "spec.nodePools[0].env[1].name"
    }  # fmt: skip


def test_a_role_twice_and_a_role_nowhere(manifest):
    grouped(manifest, {"roles": ["policy", "rollout", "reference", "policy"]}, {"roles": ["reward", "reference"]})
    errors = problems(manifest)
    assert set(errors) == {
        "spec.placement.groups[0].roles[3]",
        "spec.placement.groups[1].roles[1]",
        "spec.placement.groups",
    }
    assert "spec.placement.groups[0].roles[2]" in errors["spec.placement.groups[1].roles[1]"].fix
    assert errors["spec.placement.groups"].got == "no `critic`"


def test_a_fallback_is_another_strategy_each_time(manifest):
    grouped(manifest, {"roles": ALL, "strategy": "PACK", "fallback": ["SPREAD", "PACK", "STRICT_PACK", "SPREAD"]})
    errors = problems(manifest)
    assert set(errors) == {"spec.placement.groups[0].fallback[1]", "spec.placement.groups[0].fallback[3]"}
    assert errors["spec.placement.groups[0].fallback[1]"].expected == "another than PACK, SPREAD"


def test_a_fallback_differs_from_the_strategy_of_the_placement(manifest):
    grouped(manifest, {"roles": ALL, "fallback": ["SPREAD"]})
    manifest["spec"]["placement"]["strategy"] = "SPREAD"
    assert list(problems(manifest)) == ["spec.placement.groups[0].fallback[0]"]


@pytest.mark.parametrize(
    ("roles", "group", "paths"),
    [
        (["rollout"], {"workers": 4}, []),
        (["rollout"], {"workers": 3}, ["workers"]),
        (["rollout"], {"workers": 1}, ["workers"]),
        (["rollout"], {"workers": 2, "gpusPerWorker": 0.5}, ["gpusPerWorker"]),
        (["rollout", "reward"], {"workers": 2}, ["roles"]),
        (["rollout", "reward", "critic"], {"workers": 2}, []),
        (["rollout", "critic"], {"workers": 2, "gpusPerWorker": 0.5}, []),
        (["rollout", "critic"], {"workers": 5}, ["workers"]),
    ],
)
def test_engines_of_two_devices(manifest, roles, group, paths):
    grouped(
        manifest,
        {"roles": [role for role in ALL if role not in roles]},
        {"roles": roles, **group},
        gpusPerNode=8,
        device="cpu",
    )
    manifest["spec"]["rollout"] = {"tensorParallelSize": 2}
    assert list(problems(manifest)) == [f"spec.placement.groups[1].{path}" for path in paths]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"num_attention_heads": 8, "intermediate_size": 256}, []),
        ({"num_attention_heads": 6}, ["num_attention_heads"]),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, []),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, ["num_key_value_heads"]),
        ({"num_attention_heads": 2, "intermediate_size": 30}, ["num_attention_heads", "intermediate_size"]),
        ({}, []),
    ],
)
def test_the_devices_of_an_engine_divide_the_model(manifest, config, names):
    grouped(manifest, {"roles": ALL, "workers": 4})
    manifest["spec"]["rollout"] = {"tensorParallelSize": 4}
    manifest["spec"]["models"]["policy"]["random"]["config"] = config
    assert list(problems(manifest)) == [f"spec.models.policy.random.config.{name}" for name in names]


def test_truncated_sampling_is_refused_with_the_reason(manifest):
    manifest["spec"]["rollout"] = {"topP": 0.9}
    assert "ratios would be biased" in problems(manifest)["spec.rollout.topP"].fix


@pytest.mark.parametrize(("size", "right"), [(1, True), (12, True), (13, False)])
def test_a_mini_batch_is_at_most_a_batch(manifest, size, right):
    manifest["spec"]["data"]["batchSize"] = 4
    manifest["spec"]["rollout"] = {"samplesPerPrompt": 3}
    manifest["spec"]["algorithm"]["ppo"]["miniBatchSize"] = size
    assert list(problems(manifest)) == ([] if right else ["spec.algorithm.ppo.miniBatchSize"])


@pytest.mark.parametrize(("size", "right"), [(6, True), (7, False), (8, True), (15, True)])
def test_every_rank_has_as_many_samples_of_a_mini_batch(manifest, size, right):
    grouped(manifest, {"roles": ["policy", "critic", "reference", "rollout", "reward"], "workers": 2})
    manifest["spec"]["data"]["batchSize"] = 15
    manifest["spec"]["algorithm"]["ppo"]["miniBatchSize"] = size
    assert list(problems(manifest)) == ([] if right else ["spec.algorithm.ppo.miniBatchSize"])


@pytest.mark.parametrize("algorithm", [{"grpo": {}}, {"rloo": {}}, {"reinforcePlusPlus": {"baseline": True}}])
@pytest.mark.parametrize(("samples", "right"), [(1, False), (2, True)])
def test_comparing_samples_takes_two(manifest, algorithm, samples, right):
    manifest["spec"] |= {"algorithm": algorithm, "rollout": {"samplesPerPrompt": samples}}
    errors = problems(manifest)
    assert list(errors) == ([] if right else ["spec.rollout.samplesPerPrompt"])
    assert right or "advantage 0" in errors["spec.rollout.samplesPerPrompt"].expected


@pytest.mark.parametrize("algorithm", [{"ppo": {}}, {"reinforcePlusPlus": {}}])
def test_other_algorithms_are_content_with_one_sample(manifest, algorithm):
    manifest["spec"]["algorithm"] = algorithm
    assert problems(manifest) == {}


def without_critic(manifest, settings=None):
    """A GRPO job of eight samples a prompt, without placement."""
    manifest["spec"] |= {"algorithm": {"grpo": settings or {}}, "rollout": {"samplesPerPrompt": 8}}
    return manifest


def test_dynamic_sampling_of_one_sample_can_fill_no_batch(manifest):
    without_critic(manifest, {"dynamicSampling": {}})
    assert problems(manifest) == {}
    manifest["spec"]["rollout"] = {"samplesPerPrompt": 1}
    assert "no batch can be filled" in problems(manifest)["spec.algorithm.grpo.dynamicSampling"].expected


@pytest.mark.parametrize(("buffer", "right"), [(255, True), (256, False)])
def test_an_overlong_buffer_is_part_of_a_response(manifest, buffer, right):
    without_critic(manifest, {"overlong": {"buffer": buffer}})
    assert list(problems(manifest)) == ([] if right else ["spec.algorithm.grpo.overlong.buffer"])


@pytest.mark.parametrize(("horizon", "right"), [(64, True), (63, False)])
def test_a_horizon_is_at_least_a_step(manifest, horizon, right):
    manifest["spec"]["algorithm"]["ppo"]["kl"] = {"adaptive": {"target": 0.1, "horizon": horizon}}
    assert list(problems(manifest)) == ([] if right else ["spec.algorithm.ppo.kl.adaptive.horizon"])


def test_a_critic_is_for_ppo_alone(manifest):
    grouped(without_critic(manifest), {"roles": ["policy", "rollout", "reference"]}, {"roles": ["reward", "critic"]})
    assert list(problems(manifest)) == ["spec.placement.groups[1].roles[1]"]
    manifest["spec"]["models"]["critic"] = {"path": "/critic"}
    manifest["spec"]["training"]["criticOptimizer"] = {"learningRate": 1}
    errors = problems(manifest)
    assert set(errors) == {
        "spec.placement.groups[1].roles[1]",
        "spec.models.critic",
        "spec.training.criticOptimizer",
    }
    assert str(errors["spec.models.critic"]) == (
        "spec.models.critic: got a critic; expected none: grpo learns without one. Fix: remove it, or use ppo"
    )


@pytest.mark.parametrize(("coefficient", "right"), [(0, True), (0.1, False)])
def test_a_reference_is_needed_for_a_kl(manifest, coefficient, right):
    without_critic(manifest, {"kl": {"coefficient": coefficient}})
    grouped(manifest, {"roles": ["policy", "rollout", "reward"]})
    errors = problems(manifest)
    assert list(errors) == ([] if right else ["spec.placement.groups"])
    assert right or "kl.coefficient of grpo to 0" in errors["spec.placement.groups"].fix


def test_a_reference_that_nobody_holds_is_refused(manifest):
    without_critic(manifest, {"kl": {"coefficient": 0}})
    manifest["spec"]["models"]["reference"] = {"path": "/reference"}
    assert list(problems(manifest)) == ["spec.models.reference"]
    grouped(manifest, {"roles": ["policy", "rollout", "reward", "reference"]})
    assert problems(manifest) == {}


@pytest.mark.parametrize(("tokens", "right"), [(48, True), (47, False)])
def test_a_micro_batch_holds_a_sample(manifest, tokens, right):
    manifest["spec"]["data"] |= {"maxPromptLength": 16, "maxResponseLength": 32}
    manifest["spec"]["training"]["microBatchTokens"] = tokens
    assert list(problems(manifest)) == ([] if right else ["spec.training.microBatchTokens"])


def test_a_random_model_has_a_position_for_every_token(manifest):
    manifest["spec"]["data"] |= {"maxPromptLength": 16, "maxResponseLength": 32}
    manifest["spec"]["models"]["critic"] = {
        "random": {"architecture": "qwen2", "config": {"max_position_embeddings": 47}}
    }
    assert list(problems(manifest)) == ["spec.models.critic.random.config.max_position_embeddings"]


@pytest.mark.parametrize(("longest", "right"), [(None, True), (32, True), (33, False)])
def test_the_policy_has_a_position_for_every_token_of_an_evaluation(manifest, longest, right):
    manifest["spec"]["data"] |= {"maxPromptLength": 16, "maxResponseLength": 32}
    manifest["spec"]["data"]["evaluation"] = {"prompts": {"builtin": "arithmetic"}, "maxResponseLength": longest}
    manifest["spec"]["models"] = {
        role: {"random": {"architecture": "qwen2", "config": {"max_position_embeddings": 48}}}
        for role in ("policy", "critic", "reference")
    }
    path = "spec.models.policy.random.config.max_position_embeddings"
    assert list(problems(manifest)) == ([] if right else [path])


@pytest.mark.parametrize(
    ("gpus", "workers", "device", "right"),
    [
        (1, 4, "cuda", True),
        (0, 1, "cuda", False),
        (0, 1, "cpu", True),
        (2, 1, "cuda", False),
        (2, 1, "cpu", True),
        (1.5, 1, "cpu", False),
        (0.5, 1, "cuda", True),
        (0.5, 2, "cuda", False),
        (0.5, 2, "cpu", True),
        (0.6, 2, "cuda", True),
        (0.33333, 1, "cpu", False),
    ],
)
def test_gpus_of_a_worker(manifest, gpus, workers, device, right):
    grouped(manifest, {"roles": ALL, "workers": workers, "gpusPerWorker": gpus}, gpusPerNode=4, device=device)
    assert list(problems(manifest)) == ([] if right else ["spec.placement.groups[0].gpusPerWorker"])


def test_rewards_need_no_gpu_on_a_cuda_pool(manifest):
    grouped(manifest, {"roles": ALL[:4]}, {"roles": ["reward"], "gpusPerWorker": 0}, gpusPerNode=4)
    assert problems(manifest) == {}


def test_all_checks_report_together(manifest):
    grouped(manifest, {"roles": ["rollout"], "pool": "q"})
    manifest["spec"]["rollout"] = {"topP": 0.5}
    manifest["spec"]["algorithm"]["ppo"]["miniBatchSize"] = 1000
    assert len(problems(manifest)) >= 4
    assert len(CHECKS) == len(set(CHECKS))
