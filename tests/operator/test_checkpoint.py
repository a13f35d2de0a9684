"""Checkpoints as the manifest and the command line have them."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from rlhf_api import FieldError, RLHFJob, RuntimeConfig, SpecError
from rlhf_api.checkpoint import Checkpoint
from rlhf_operator import cli
from rlhf_operator.defaults import apply_defaults
from rlhf_operator.local import plan_here
from rlhf_operator.plan import build_plan
from rlhf_operator.validate import validate
from ruamel.yaml import YAML
from typer.testing import CliRunner

STORAGE = {"name": "saved", "persistentVolumeClaim": "saved", "mountPath": "/saved"}


def rlhf(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def become(monkeypatch):
    """The arguments of the program that the command would become."""
    calls = []
    monkeypatch.setattr(os, "execv", lambda _, arguments: calls.append(arguments))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda how, signals: None)
    return calls


@pytest.fixture
def written(manifest, tmp_path):
    """Writes the manifest with this checkpoint field."""

    def write(checkpoint: dict | None) -> Path:
        if checkpoint is not None:
            manifest["spec"]["checkpoint"] = checkpoint
        with (tmp_path / "job.yaml").open("w") as file:
            YAML().dump(manifest, file)
        return tmp_path / "job.yaml"

    return write


def run(file, *options):
    return rlhf("run", file, "--runs-dir", file.parent / "runs", *options)


def config_of(file) -> RuntimeConfig:
    return RuntimeConfig.parse(json.loads((file.parent / "runs" / "job" / "runtime.json").read_text()))


def finish_step(file, folder="checkpoints", step=20):
    (file.parent / "runs" / "job" / folder / f"step-{step:06d}").mkdir(parents=True)
    (file.parent / "runs" / "job" / "metrics.jsonl").write_text("earlier")


@pytest.mark.parametrize(
    ("written", "expected"),
    [("checkpoints", "/runs/job/checkpoints"), ("a/../b", "/runs/job/a/../b"), ("/saved/job", "/saved/job")],
)
def test_a_path_starts_at_the_runs_folder_or_is_absolute(manifest, written, expected):
    manifest["spec"]["checkpoint"] = {"path": written}
    config = build_plan(RLHFJob.parse(manifest), "/runs/job").config
    assert config.checkpoint == Checkpoint(path=expected)


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("model", False),
        ("x/../model/deep", False),
        ("/runs/job/./model", False),
        ("../job/.model-partial", False),
        ("models", True),
        ("/runs/other/model", True),
        (".", True),
        ("..", True),
    ],
)
def test_checkpoints_do_not_lie_where_the_trained_model_goes(manifest, path, right):
    manifest["spec"]["checkpoint"] = {"path": path}
    told = refusals(manifest, "/runs/job")
    assert [error.path for error in told] == ([] if right else ["spec.checkpoint.path"])
    assert right or str(told[0]).startswith(f"spec.checkpoint.path: got `{path}`; expected a folder outside of `model`")


def test_the_run_folder_is_not_taken_for_a_checkpoint(manifest):
    manifest["spec"]["checkpoint"] = {"path": ".."}
    [told] = refusals(manifest, "/runs/step-20/")
    assert told.path == "spec.checkpoint.path"
    assert "Fix: choose another path, or rename the job" in str(told)


def test_a_mount_that_leads_there_is_refused_too(manifest, tmp_path):
    manifest["spec"] |= {"checkpoint": {"path": "/saved/model"}, "storage": [STORAGE]}
    run_dir = tmp_path / "runs/job"
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.path: got `\S+/runs/job/model`; expected a folder outside"):
        plan_here(RLHFJob.parse(manifest), tmp_path, {"saved": run_dir}, run_dir, lambda: 0)


def refusals(manifest: dict, run_dir: str) -> list[FieldError]:
    try:
        build_plan(RLHFJob.parse(manifest), run_dir)
    except SpecError as error:
        return list(error.errors)
    return []


def test_without_the_field_there_are_none(manifest):
    assert build_plan(RLHFJob.parse(manifest), "/runs/job").config.checkpoint is None


def test_a_folder_stands_in_the_place_of_a_storage(manifest, tmp_path):
    manifest["spec"] |= {"checkpoint": {"path": "/saved/job"}, "storage": [STORAGE]}
    job = RLHFJob.parse(manifest)
    made = plan_here(job, tmp_path, {"saved": tmp_path / "disk"}, tmp_path / "runs/job", lambda: 0)
    assert made.config.checkpoint.path == str(tmp_path / "disk" / "job")
    with pytest.raises(SpecError, match=r"spec\.checkpoint\.path: got `/saved/job` on storage.*--mount saved=DIR"):
        plan_here(job, tmp_path, {}, tmp_path / "runs/job", lambda: 0)


@pytest.mark.parametrize(("path", "right"), [("/saved/job", False), ("/savedjob", True), ("saved", True)])
def test_a_read_only_storage_takes_none(manifest, path, right):
    manifest["spec"] |= {"checkpoint": {"path": path}, "storage": [STORAGE | {"readOnly": True}]}
    errors = validate(apply_defaults(RLHFJob.parse(manifest)))
    assert [error.path for error in errors] == ([] if right else ["spec.checkpoint.path"])


@pytest.mark.parametrize(("field", "options"), [({"resume": True}, []), ({}, ["--resume"])])
def test_a_run_goes_on_in_its_folder(written, become, field, options):
    file = written(field)
    finish_step(file)
    assert run(file, *options).exit_code == 0
    assert len(become) == 1
    assert config_of(file).checkpoint.resume
    assert (file.parent / "runs/job/metrics.jsonl").read_text() == "earlier"


@pytest.mark.parametrize("field", [None, {}])
def test_without_a_word_a_run_starts_anew(written, become, field):
    file = written(field)
    finish_step(file)
    assert f"The earlier run's folder is now {file.parent}/runs/job.1" in run(file).stdout
    assert not (file.parent / "runs/job/checkpoints").exists()


def test_resume_true_without_checkpoints_starts_anew(written, become):
    file = written({"resume": True})
    finish_step(file, "elsewhere")
    assert run(file).exit_code == 0
    assert (file.parent / "runs/job.1/elsewhere").exists()


@pytest.mark.parametrize(
    ("field", "got"), [({}, "no checkpoint in {runs}/job/checkpoints"), (None, "a manifest without spec.checkpoint")]
)
def test_asked_to_resume_from_nothing_it_says_so(written, become, field, got):
    file = written(field)
    result = run(file, "--resume")
    assert (result.exit_code, become) == (2, [])
    assert f"--resume: got {got.format(runs=file.parent / 'runs')}; expected a checkpoint" in result.stderr
    assert not (file.parent / "runs").exists()


def test_a_run_on_a_storage_goes_on_where_its_folder_is_gone(written, become, tmp_path):
    saved = tmp_path / "disk" / "step-000020"
    saved.mkdir(parents=True)
    file = written({"path": str(saved.parent), "resume": True})
    assert run(file).exit_code == 0
    assert config_of(file).checkpoint.path == str(saved.parent)


def test_export_becomes_the_runtimes(become):
    assert rlhf("export", "runs/job", "out").exit_code == 0
    assert become == [[sys.executable, "-m", "rlhf_runtime.export", "runs/job", "out"]]
