from pathlib import Path

import pytest
from rlhf_api import RLHFJob, SpecError
from rlhf_api.errors import format_path
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
        "spec.rayVersion",
        "spec.suspend",
        "spec.models.policy.lora",
        "spec.rewards[0].function.name",
        "spec.rewards[1].remote",
        "spec.rewards[2].model",
        "spec.data.evaluation",
        "spec.training.mode",
        "spec.training.maxStaleness",
        "spec.nodePools[1].minNodes",
        "spec.nodePools[1].maxNodes",
        "spec.checkpoint",
        "spec.observability.prometheus",
        "spec.observability.wandb",
        "spec.backoffLimit",
        "spec.infrastructureBackoffLimit",
        "spec.activeDeadlineSeconds",
        "spec.preRunningDeadlineSeconds",
        "spec.ttlSecondsAfterFinished",
    }


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforcePlusPlus"])
def test_a_planned_algorithm_is_not_supported_rather_than_missing_ppo(manifest, algorithm):
    manifest["spec"]["algorithm"] = {algorithm: {}}
    errors = errors_of(manifest)
    assert list(errors) == [f"spec.algorithm.{algorithm}"]
    assert "not supported yet" in errors[f"spec.algorithm.{algorithm}"].fix


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


@pytest.mark.parametrize("cpu", [1, 0.5, "64", "500m", "1.5"])
def test_cpu_quantities(manifest, cpu):
    manifest["spec"]["nodePools"][0]["cpu"] = cpu
    RLHFJob.parse(manifest)


@pytest.mark.parametrize("cpu", [0, "0m", -1, True, "5Gi", "1e3", "", [], float("inf")])
def test_cpu_quantities_that_are_none(manifest, cpu):
    manifest["spec"]["nodePools"][0]["cpu"] = cpu
    assert list(errors_of(manifest)) == ["spec.nodePools[0].cpu"]


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
