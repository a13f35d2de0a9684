from decimal import Decimal
from pathlib import Path

import pytest
from rlhf_api import RLHFJob, SpecError
from rlhf_api.algorithm import ALGORITHMS
from rlhf_api.errors import format_path
from rlhf_api.quantity import cpu_count, quantity_value
from ruamel.yaml import YAML

DESIGN = Path(__file__).with_name("design.yaml")


def errors_of(manifest):
    with pytest.raises(SpecError) as caught:
        RLHFJob.parse(manifest)
    return {error.path: error for error in caught.value.errors}


def test_the_smallest_manifest_is_enough(manifest):
    assert RLHFJob.parse(manifest).spec.training.steps == 3


def test_of_the_whole_design_only_what_is_not_built_is_refused():
    errors = errors_of(YAML(typ="safe", pure=True).load(DESIGN))
    assert all("not supported yet" in error.fix for error in errors.values()), "\n".join(map(str, errors.values()))
    assert set(errors) == {
        "spec.models.policy.lora",
        "spec.rewards[0].function.name",
        "spec.rewards[1].remote",
        "spec.training.mode",
        "spec.training.maxStaleness",
        "spec.checkpoint.exportHuggingFace",
        "spec.observability.wandb",
    }


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_algorithm_stands_alone_with_its_own_defaults(manifest, name):
    manifest["spec"]["algorithm"] = {name: {}}
    algorithm = RLHFJob.parse(manifest).spec.algorithm
    assert algorithm.name == name
    kl = algorithm.settings.kl
    expected = {
        "ppo": (0.001, "k1", "reward", "tokenMean", True),
        "grpo": (0.04, "k3", "loss", "sequenceMeanTokenMean", False),
        "rloo": (0.05, "k1", "reward", "sequenceMeanTokenSum", False),
        "reinforcePlusPlus": (0.01, "k1", "reward", "tokenMean", True),
    }[name]
    settings = algorithm.settings
    assert (kl.coefficient, kl.estimator, kl.location, settings.loss_aggregation, settings.whiten) == expected


def test_a_part_of_the_kl_leaves_the_algorithms_other_defaults(manifest):
    manifest["spec"]["algorithm"] = {"grpo": {"kl": {"coefficient": 0.5}}}
    kl = RLHFJob.parse(manifest).spec.algorithm.settings.kl
    assert (kl.coefficient, kl.estimator, kl.location) == (0.5, "k3", "loss")


@pytest.mark.parametrize("given", [{}, {"ppo": None}])
def test_no_algorithm_is_too_few(manifest, given):
    manifest["spec"]["algorithm"] = given
    error = errors_of(manifest)["spec.algorithm"]
    assert error.expected == "exactly one of ppo, grpo, rloo, reinforcePlusPlus"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"kl": {"estimator": "k1", "in": "loss"}},
            "spec.algorithm.ppo.kl: got k1 in the loss, whose gradient is 0 on average; expected k2 or k3 in the loss. "
            "Fix: use `estimator: k2`, whose gradient is the KL's own, or `in: reward`",
        ),
        (
            {"kl": {"estimator": "k3", "in": "loss", "adaptive": {"target": 0.1}}},
            "spec.algorithm.ppo.kl: got `adaptive` with `in: loss`; expected a fixed coefficient in the loss. "
            "Fix: use `in: reward`",
        ),
        (
            {"kl": {"coefficient": 0, "adaptive": {"target": 0.1}}},
            "spec.algorithm.ppo.kl: got `adaptive` with coefficient 0, which it only multiplies; expected a positive "
            "one. Fix: start from a positive coefficient, or remove `adaptive`",
        ),
        (
            {"kl": {"adaptive": {"horizon": 100}}},
            "spec.algorithm.ppo.kl.adaptive.target: got nothing; expected a value. Fix: add `target`",
        ),
        (
            {"lossConstant": 64},
            "spec.algorithm.ppo: got `lossConstant` with `lossAggregation: tokenMean`; expected it with `constant` "
            "alone. Fix: use `lossAggregation: constant`, or remove `lossConstant`",
        ),
        (
            {"dualClip": 1},
            "spec.algorithm.ppo.dualClip: got 1; expected a value greater than 1. Fix: give such a value",
        ),
        (
            {"lossAggregation": "token-mean"},
            "spec.algorithm.ppo.lossAggregation: got 'token-mean'; expected one of 'tokenMean', "
            "'sequenceMeanTokenMean', 'sequenceMeanTokenSum' or 'constant'. Fix: did you mean 'tokenMean'?",
        ),
    ],
)
def test_constants_that_contradict_each_other_are_refused_with_the_reason(manifest, settings, line):
    manifest["spec"]["algorithm"]["ppo"] = settings
    assert [str(error) for error in errors_of(manifest).values()] == [line]


def test_a_planned_source_is_one_error(manifest):
    manifest["spec"]["models"] = {"policy": {"huggingFace": {"repo": "a/b"}}}
    assert list(errors_of(manifest)) == ["spec.models.policy.huggingFace"]


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        ((), "spek", "spec"),
        (("metadata",), "nam", "name"),
        (("spec",), "nodepools", "nodePools"),
        (("spec", "algorithm"), "pppo", "ppo"),
        (("spec", "algorithm", "ppo"), "mini_batch_size", "miniBatchSize"),
        (("spec", "models", "policy"), "pth", "path"),
        (("spec", "rewards", 0, "function"), "import_path", "importPath"),
        (("spec", "nodePools", 0), "gpuPerNode", "gpusPerNode"),
        (("spec", "training"), "stepz", "steps"),
    ],
)
def test_an_unknown_field_is_answered_with_the_nearest_name(manifest, path, wrong, right):
    place = manifest
    for part in path:
        place = place[part]
    place[wrong] = 1
    error = errors_of(manifest)[format_path((*path, wrong))]
    assert error.got == f"unknown field `{wrong}`"
    assert error.fix == f"did you mean `{right}`?"


@pytest.mark.parametrize(
    ("reward", "got"),
    [
        ({}, "none of them"),
        ({"function": {"name": "digit_share"}, "model": {"path": "/rm"}}, "function and model"),
    ],
)
def test_a_reward_is_a_function_or_a_model(manifest, reward, got):
    manifest["spec"]["rewards"] = [{"name": "r", **reward}]
    error = errors_of(manifest)["spec.rewards[0]"]
    assert (error.got, error.expected) == (got, "exactly one of function, model")


def test_a_remote_reward_is_one_error(manifest):
    manifest["spec"]["rewards"] = [{"name": "r", "remote": {"url": "http://judge"}}]
    assert list(errors_of(manifest)) == ["spec.rewards[0].remote"]


@pytest.mark.parametrize(
    ("given", "name"), [({"samplesPerPrompt": 2}, "samplesPerPrompt"), ({"topP": 0.9}, "topP"), ({}, None)]
)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_an_evaluation_samples_only_above_temperature_0(manifest, given, name, temperature):
    given = given | {"prompts": {"builtin": "arithmetic"}, "temperature": temperature}
    manifest["spec"]["data"]["evaluation"] = given
    if name is None or temperature:
        assert RLHFJob.parse(manifest).spec.data.evaluation.every_steps == 20
    else:
        assert errors_of(manifest)["spec.data.evaluation"].fix == f"raise `temperature`, or remove `{name}`"


@pytest.mark.parametrize("temperature", [0.01, 2])
def test_temperatures_that_vllm_samples_at(manifest, temperature):
    manifest["spec"]["rollout"] = {"temperature": temperature}
    manifest["spec"]["data"]["evaluation"] = {"prompts": {"builtin": "arithmetic"}, "temperature": temperature}
    assert RLHFJob.parse(manifest).spec.rollout.temperature == temperature


@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_temperatures_that_vllm_would_change_or_refuse(manifest, temperature):
    manifest["spec"]["rollout"] = {"temperature": temperature}
    manifest["spec"]["data"]["evaluation"] = {"prompts": {"builtin": "arithmetic"}, "temperature": temperature}
    assert set(errors_of(manifest)) == {"spec.rollout.temperature", "spec.data.evaluation.temperature"}


def test_two_algorithms_are_one_too_many(manifest):
    manifest["spec"]["algorithm"] = {"ppo": {}, "grpo": {}}
    error = errors_of(manifest)["spec.algorithm"]
    assert (error.got, error.fix) == ("ppo and grpo", "keep one of ppo, grpo")


def test_all_problems_are_told_at_once(manifest):
    spec = manifest["spec"]
    manifest["metadata"]["name"] = "Not_a_name"
    spec["training"] = {"steps": 0, "optimizer": {"learningRate": -1}}
    spec["data"]["batchSize"] = "many"
    spec["nodePools"].append({"nodes": 1})
    spec["rewards"] = []
    assert set(errors_of(manifest)) == {
        "metadata.name",
        "spec.training.steps",
        "spec.training.optimizer.learningRate",
        "spec.data.batchSize",
        "spec.nodePools[1].name",
        "spec.rewards",
    }


@pytest.mark.parametrize(
    ("section", "value", "line"),
    [
        (
            "training",
            {"steps": 1, "mode": "asink"},
            "spec.training.mode: got 'asink'; expected 'sync'. Fix: use 'sync'",
        ),
        (
            "training",
            {"steps": 1, "optimizer": {"learningRate": "1e-6"}},
            "spec.training.optimizer.learningRate: got '1e-6'; expected a number. Fix: write the number without quotes",
        ),
        (
            "data",
            {"prompts": {"builtin": "arithmetic"}, "batchSize": True},
            "spec.data.batchSize: got true; expected a whole number. Fix: write a number",
        ),
        ("data", {"prompts": {}}, "spec.data.prompts: got none of them; expected exactly one of path, builtin, inline. "
         "Fix: add one of path, builtin, inline"),
        ("rewards", [], "spec.rewards: got 0 of them; expected at least 1. Fix: add some"),
        ("rollout", None, "spec.rollout: got nothing; expected a mapping. Fix: indent its fields below it"),
        (
            "rewards",
            [{"name": "a", "function": {"name": "digits_share"}}],
            "spec.rewards[0].function.name: got 'digits_share'; expected one of 'digit_share' or 'exact_match'. "
            "Fix: did you mean 'digit_share'?",
        ),
    ],
)  # fmt: skip
def test_what_an_error_says(manifest, section, value, line):
    manifest["spec"][section] = value
    assert [str(error) for error in errors_of(manifest).values()] == [line]


@pytest.mark.parametrize("value", [None, [], "text", 3, {1: 2}])
def test_a_document_that_is_no_mapping_is_refused(value):
    assert errors_of(value)


def test_a_reference_has_one_source(manifest):
    manifest["spec"]["models"]["reference"] = {"path": "a", "random": {"architecture": "qwen2"}}
    assert errors_of(manifest)["spec.models.reference"].got == "path and random"


def test_numbers_that_no_machine_has_are_refused(manifest):
    groups = [{"name": "all", "pool": "local", "roles": ["policy"], "workers": 10**400}]
    manifest["spec"] |= {"placement": {"groups": groups}, "rollout": {"tensorParallelSize": 10**400}}
    assert set(errors_of(manifest)) == {"spec.placement.groups[0].workers", "spec.rollout.tensorParallelSize"}


@pytest.mark.parametrize(
    ("cpu", "count"),
    [(1, 1), (2.0, 2), ("64", 64), ("500m", 0.5), ("1.5", 1.5), ("1e3", 1000), (".5", 0.5), ("+2", 2), ("1k", 1000)],
)
def test_cpu_quantities(manifest, cpu, count):
    manifest["spec"]["nodePools"][0]["cpu"] = cpu
    assert cpu_count(RLHFJob.parse(manifest).spec.node_pools[0].cpu) == count


@pytest.mark.parametrize("cpu", [0, "0m", -1, "-1", True, "5Gi", "1 ", "", [], 10**400, "1u", float("inf")])
def test_cpu_quantities_that_are_none(manifest, cpu):
    manifest["spec"]["nodePools"][0]["cpu"] = cpu
    assert list(errors_of(manifest)) == ["spec.nodePools[0].cpu"]


def test_a_fraction_as_a_quantity_is_put_in_quotes(manifest):
    manifest["spec"]["nodePools"][0]["memory"] = 1.5
    assert errors_of(manifest)["spec.nodePools[0].memory"].fix == 'put it in quotes: "1.5"'


@pytest.mark.parametrize(
    ("quantity", "value"), [("2Ki", 2048), ("1.5Gi", 3 * 2**29), ("1M", 10**6), ("3e2", 300), ("1500m", Decimal("1.5"))]
)
def test_the_number_of_a_quantity(quantity, value):
    assert quantity_value(quantity) == value


@pytest.mark.parametrize("quantity", ["16Ei", "0", "1Q", "1e", "1.5.0", "\u0661", "1\n"])
def test_quantities_that_are_none(manifest, quantity):
    manifest["spec"]["nodePools"][0]["memory"] = quantity
    assert list(errors_of(manifest)) == ["spec.nodePools[0].memory"]


@pytest.mark.parametrize(
    ("bounds", "right"), [((1, 4), True), ((2, 2), True), ((3, 4), False), ((1, 1), False), ((None, 1), False)]
)
def test_nodes_lie_within_their_bounds(manifest, bounds, right):
    pool = manifest["spec"]["nodePools"][0]
    pool |= {"nodes": 2, "minNodes": bounds[0], "maxNodes": bounds[1]}
    if right:
        assert RLHFJob.parse(manifest).spec.node_pools[0].node_bounds == bounds
    else:
        assert errors_of(manifest)["spec.nodePools[0]"].expected == "minNodes <= nodes <= maxNodes"


SECRET = {"secretKeyRef": {"name": "hub", "key": "token"}}


@pytest.mark.parametrize(
    ("variable", "path"),
    [
        ({"name": "A", "value": ""}, None),
        ({"name": "A", "valueFrom": SECRET}, None),
        ({"name": "A", "value": "1", "valueFrom": SECRET}, "spec.env[0]"),
        ({"name": "A", "valueFrom": {}}, "spec.env[0].valueFrom"),
        ({"name": "A", "valueFrom": SECRET | {"configMapKeyRef": SECRET["secretKeyRef"]}}, "spec.env[0].valueFrom"),
        ({"name": "A", "value": 1}, "spec.env[0].value"),
        ({"name": "1A"}, "spec.env[0].name"),
    ],
)
def test_a_variable_has_a_value_or_a_source(manifest, variable, path):
    manifest["spec"]["env"] = [variable]
    if path is None:
        assert RLHFJob.parse(manifest).spec.env[0].name == "A"
    else:
        assert list(errors_of(manifest)) == [path]


@pytest.mark.parametrize("row", [3, None, [], {"prompt": float("nan")}])
def test_inline_rows_are_texts_or_json(manifest, row):
    manifest["spec"]["data"]["prompts"] = {"inline": ["1+1=", row]}
    assert list(errors_of(manifest)) == ["spec.data.prompts.inline[1]"]


def test_names_of_python_are_not_names_of_the_manifest(manifest):
    manifest["spec"]["data"]["batch_size"] = 4
    assert errors_of(manifest)["spec.data.batch_size"].fix == "did you mean `batchSize`?"


def test_half_a_character_is_refused(manifest):
    manifest["spec"]["data"]["prompts"] = {"inline": [{"prompt": "\ud800"}]}
    assert errors_of(manifest)["the document"].expected == "text that UTF-8 can hold"
