"""What training does with a checkpoint before any worker is started."""

from pathlib import Path

import pytest
from rlhf_api import RuntimeConfig
from rlhf_runtime import trainer
from rlhf_runtime.checkpoint.driver_state import write_metrics
from rlhf_runtime.checkpoint.identity import trained_from
from rlhf_runtime.checkpoint.manifest import Checkpoint, Manifest
from rlhf_runtime.checkpoint.store import Found
from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.errors import InputError
from rlhf_runtime.export import trained_by
from rlhf_runtime.models import model_folder
from rlhf_runtime.report import Report, sinks_of
from rlhf_runtime.types import Prompt, PromptSets

PROMPTS = [Prompt(0, "1+1=", [5, 6])]
STEPS = 12


@pytest.fixture
def config(make_config, tmp_path: Path) -> RuntimeConfig:
    return make_config(runDir=str(tmp_path), checkpoint={"path": str(tmp_path / "checkpoints"), "resume": True})


@pytest.fixture
def found(config: RuntimeConfig, tmp_path: Path) -> Found:
    """The checkpoint of the last step, and a later one that was not finished."""
    folder = tmp_path / "checkpoints" / f"step-{STEPS:06d}"
    folder.mkdir(parents=True)
    write_metrics(folder, [{"step": step, "reward_mean": 0.1} for step in range(1, STEPS + 1)])
    origin = trained_from(config, {role: model_folder(config, role) for role in config.models.by_role}, PROMPTS)
    manifest = Manifest(
        format_version=1, step=STEPS, weight_version=STEPS, ranks={"policy": 1}, trained_from=origin, files={}
    )
    return Found(Checkpoint(folder, manifest), unfinished=(folder.with_name(".step-000013-partial"),))


@pytest.fixture(autouse=True)
def _no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(trainer, "HealthMonitor")
    monkeypatch.delattr(trainer, "Trainer")


def test_another_jobs_checkpoint_is_refused_before_anything_is_reported(config, found, tmp_path):
    with pytest.raises(InputError, match=r"^data\.prompts: got content \S+; expected content \S+, as in "):
        trainer.train(config, PromptSets(PROMPTS * 2), Report(config, sinks_of(config, DriverLog())), found)
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("exported", ["the same", "an earlier step", "another run", "untold", "none"])
def test_a_job_that_is_done_says_so_and_leaves_its_own_model(config, found, tmp_path, capsys, monkeypatch, exported):
    written = []
    monkeypatch.setattr(trainer, "export_checkpoint", lambda checkpoint, folder: written.append(folder))
    same = trained_by(found.checkpoint.manifest)
    told = {
        "the same": same,
        "an earlier step": same.model_copy(update={"step": STEPS - 1}),
        "another run": same.model_copy(update={"checkpoint": "other"}),
    }
    if exported != "none":
        (tmp_path / "model").mkdir()
    if exported in told:
        told[exported].write(tmp_path / "model")
    report = Report(config, sinks_of(config, DriverLog()))
    trainer.train(config, PromptSets(PROMPTS), report, found)
    said = capsys.readouterr().out
    assert f"Nothing to train: {found.checkpoint.folder} is of step 12, and the job has 12" in said
    assert ".step-000013-partial: it was not finished" in said
    assert report.summary().steps == STEPS
    assert written == ([] if exported == "the same" else [tmp_path / "model"])
