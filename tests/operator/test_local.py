import json
from pathlib import Path

import pytest
from rlhf_api import RLHFJob, SpecError
from rlhf_operator.local import parse_mounts, plan_here, visible_gpus

STORAGE = [
    {"name": "models", "persistentVolumeClaim": "models", "mountPath": "/models"},
    {"name": "inner", "persistentVolumeClaim": "inner", "mountPath": "/models/inner/"},
]


@pytest.fixture
def disk(tmp_path):
    """A folder with a model at m/qwen and at inner/qwen, and prompts at m/train.jsonl."""
    for model in (tmp_path / "m/qwen", tmp_path / "inner/qwen"):
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    (tmp_path / "m/train.jsonl").write_text("{}\n")
    return tmp_path


def plan(manifest, disk, gpus=0, **mounts):
    folders = {name: disk / folder for name, folder in mounts.items()}
    return plan_here(RLHFJob.parse(manifest), disk, folders, disk / "runs/job", lambda: gpus)


def errors_of(manifest, disk, gpus=0, **mounts):
    with pytest.raises(SpecError) as caught:
        plan(manifest, disk, gpus, **mounts)
    return {error.path: error for error in caught.value.errors}


def use(manifest, model, prompts=None):
    manifest["spec"]["models"] = {"policy": {"path": model}}
    manifest["spec"]["storage"] = STORAGE
    if prompts:
        manifest["spec"]["data"]["prompts"] = {"path": prompts}
    return manifest


def test_folders_stand_in_the_place_of_volumes(manifest, disk):
    use(manifest, "/models/qwen", "/models/train.jsonl")
    manifest["spec"]["models"]["critic"] = {"path": "/models/inner/qwen"}
    config = plan(manifest, disk, models="m", inner="inner").config
    assert config.models.policy.path == str(disk / "m/qwen")
    assert config.models.reference.path == str(disk / "m/qwen")
    assert config.models.critic.path == str(disk / "inner/qwen")
    assert config.data.prompts.path == str(disk / "m/train.jsonl")


def test_held_out_prompts_and_reward_models_may_lie_on_volumes_too(manifest, disk):
    use(manifest, "/models/qwen")
    manifest["spec"]["data"]["evaluation"] = {"prompts": {"path": "/models/train.jsonl"}}
    manifest["spec"]["rewards"].append({"name": "judge", "model": {"path": "/models/inner/qwen"}})
    config = plan(manifest, disk, models="m", inner="inner").config
    assert config.data.evaluation.prompts.path == str(disk / "m/train.jsonl")
    assert config.rewards[1].model.path == str(disk / "inner/qwen")
    (disk / "m/train.jsonl").unlink()
    errors = errors_of(manifest, disk, models="m")
    assert errors["spec.data.evaluation.prompts.path"].expected == "a JSONL file that exists"
    assert errors["spec.rewards[1].model.path"].fix == "add --mount inner=DIR"


def test_relative_paths_start_at_the_manifest(manifest, disk):
    config = plan(use(manifest, "m/qwen", "./m/../m/train.jsonl"), disk).config
    assert config.models.policy.path == str(disk / "m/qwen")
    assert config.data.prompts.path == str(disk / "m/train.jsonl")
    assert config.run_dir == str(disk / "runs/job")


def test_a_volume_is_a_folder_not_a_prefix_of_letters(manifest, disk):
    error = errors_of(use(manifest, "/models2/qwen"), disk, models="m")["spec.models.policy.path"]
    assert error.got == "`/models2/qwen`"


def test_paths_on_a_storage_that_is_not_mounted(manifest, disk):
    errors = errors_of(use(manifest, "/models/inner/qwen", "/models/train.jsonl"), disk)
    assert errors["spec.models.policy.path"].fix == "add --mount inner=DIR"
    assert errors["spec.data.prompts.path"].fix == "add --mount models=DIR"


def test_files_that_are_not_there(manifest, disk):
    (disk / "m/qwen/config.json").unlink()
    errors = errors_of(use(manifest, "/models/qwen", "nowhere.jsonl"), disk, models="m")
    assert errors["spec.models.policy.path"].expected == "a model folder with a config.json"
    assert str(disk / "m/qwen") in errors["spec.models.policy.path"].got
    assert errors["spec.data.prompts.path"].expected == "a JSONL file that exists"


def test_paths_that_may_not_be_looked_at_are_told(manifest, disk):
    long = "x" * 300  # such a name cannot be looked at by anybody, as a folder without rights by others
    errors = errors_of(use(manifest, f"/models/{long}"), disk, models="m")
    assert errors["spec.models.policy.path"].got == (
        f"`/models/{long}`, which cannot be read (File name too long: {disk / 'm' / long})"
    )
    with pytest.raises(SpecError, match=r"--mount: got `/x+`; expected a folder that exists"):
        parse_mounts([f"models=/{long}"])


def test_problems_of_files_mounts_and_fields_are_told_together(manifest, disk):
    use(manifest, "nowhere")
    manifest["spec"]["rollout"] = {"topP": 0.5}
    manifest["spec"]["code"] = {"configMap": "rewards"}
    assert set(errors_of(manifest, disk, data="m")) == {
        "spec.models.policy.path", "--mount", "spec.code.configMap", "spec.rollout.topP"
    }  # fmt: skip


def test_code_beside_the_manifest_goes_on_the_path(manifest, disk):
    manifest["spec"]["code"] = {"configMap": "rewards"}
    (disk / "rewards").mkdir()
    assert plan(manifest, disk).config.python_path == [str(disk / "rewards")]


@pytest.mark.parametrize("option", ["models", "=m", "models=", "models=nowhere"])
def test_mounts_that_cannot_be(option):
    with pytest.raises(SpecError, match="--mount"):
        parse_mounts([option])


def test_mounts_are_absolute_and_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b").mkdir()
    assert parse_mounts(["models=a=b"]) == {"models": tmp_path / "a=b"}
    with pytest.raises(SpecError, match="again"):
        parse_mounts(["models=a=b", "models=a=b"])


def test_gpus_that_are_not_there(manifest, disk):
    manifest["spec"]["nodePools"] = [{"name": "a", "nodes": 2, "gpusPerNode": 4}, {"name": "b", "gpusPerNode": 1}]
    plan(manifest, disk, gpus=9)
    errors = errors_of(manifest, disk, gpus=8)
    assert errors["spec.nodePools[0]"].got == "8 GPUs (nodes 2 times gpusPerNode 4; all `cuda` pools want 9)"
    assert errors["spec.nodePools[1]"].expected == "at most 8, which this machine has"


def test_a_cpu_pool_may_ask_for_gpus_that_are_not_there(manifest, disk):
    manifest["spec"]["nodePools"] = [{"name": "a", "gpusPerNode": 4, "device": "cpu"}]
    assert plan(manifest, disk, gpus=0).config.local_nodes[0].resources["GPU"] == 4.0


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("2, 0", 2), ("0,7,1", 1), ("GPU-b", 1), ("GPU-x", 0), ("MIG-1", 1)],
)
def test_gpus_are_those_that_cuda_would_see(chosen, count):
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert visible_gpus(environment, lambda: ["GPU-a1", "GPU-b2", "GPU-c3"]) == count


def test_a_machine_without_nvidia_smi_has_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == 0


def test_the_resolved_job_can_be_written_and_planned_again(manifest, disk):
    first = plan(use(manifest, "/models/qwen"), disk, models="m")
    again = RLHFJob.parse(json.loads(first.job.model_dump_json(by_alias=True)))
    assert plan_here(again, Path("/"), {}, disk / "runs/job", lambda: 0).config == first.config
