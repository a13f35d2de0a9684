import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rlhf_api.run_end import RunEnd
from rlhf_runtime import __main__ as program
from rlhf_runtime.errors import CheckpointError, InfrastructureError
from rlhf_runtime.report import Report, StepRecord

STEP = {"step": 1, "reward_mean": 0.25, "weight_version": 1}


@pytest.fixture
def end_with(make_config, tmp_path, monkeypatch, capsys):
    """Runs the program on a training that does one step and ends as it is told to: exit code, output, errors."""

    def end_with(error, **changes):
        def train(config, run):
            run.report = Report(config, [])
            run.report.start()
            run.report.step(StepRecord(dict(STEP), [], []))
            if error:
                raise error

        monkeypatch.setattr(program, "_train", train)
        config = tmp_path / "runtime.json"
        config.write_text(make_config(runDir=str(tmp_path), **changes).model_dump_json(by_alias=True))
        monkeypatch.setattr(sys, "argv", ["rlhf_runtime", str(config)])
        code = program.main()
        told = capsys.readouterr()
        return code, told.out, told.err

    return end_with


def test_an_error_that_cannot_be_kept_is_told_before_its_details(end_with, tmp_path):
    (tmp_path / "error.log").symlink_to("/dev/full")
    code, output, errors = end_with(ValueError("no room for weights"))
    first, *details = errors.splitlines()
    assert code == 1
    assert first == "Unexpected ValueError: no room for weights"
    assert details[-1] == "ValueError: no room for weights"
    end = RunEnd.last_of(output)
    assert (end.exit_code, end.reason, end.message) == (1, "Unexpected", first)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, (0, "Completed", "")),
        (InfrastructureError("a worker is gone"), (5, "InfrastructureLost", "a worker is gone")),
        (CheckpointError("the disk is full"), (6, "CheckpointFailed", "the disk is full")),
    ],
    ids=["done", "worker lost", "disk full"],
)
def test_the_last_line_is_the_summary_and_the_end(end_with, make_config, error, end):
    code, output, errors = end_with(error)
    summary = json.loads(output.splitlines()[-1])
    code_told, reason, message = end
    assert (code, errors.strip()) == (code_told, message)
    told = summary.pop("end")
    progress = told.pop("progress")
    assert told == {"exitCode": code_told, "reason": reason, "message": message}
    report = Report(make_config(), [])
    assert (progress["step"], progress["reward"]) == (STEP["step"], STEP["reward_mean"])
    report.step(StepRecord(dict(STEP), [], []))
    assert summary == asdict(report.summary())


def test_a_storage_that_is_lost_does_not_keep_a_run_from_telling_its_end(end_with, tmp_path, monkeypatch):
    (tmp_path / "step-000001").mkdir()

    def lost(self):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "is_dir", lost)
    code, output, _ = end_with(CheckpointError("the storage is gone"), checkpoint={"path": str(tmp_path)})
    end = RunEnd.last_of(output)
    assert (code, end.reason, end.progress.step) == (6, "CheckpointFailed", 1)


@pytest.mark.parametrize(("arguments", "goes_on"), [([], False), (["--resume"], True)], ids=["first", "later"])
def test_a_later_try_goes_on_from_checkpoints_of_the_ones_before(
    make_config, tmp_path, monkeypatch, arguments, goes_on
):
    trained = []
    monkeypatch.setattr(program, "_train", lambda config, run: trained.append(config))
    config = tmp_path / "runtime.json"
    config.write_text(make_config(checkpoint={"path": str(tmp_path)}).model_dump_json(by_alias=True))
    monkeypatch.setattr(sys, "argv", ["rlhf_runtime", str(config), *arguments])
    assert program.main() == 0
    assert [config.checkpoint.resume for config in trained] == [goes_on]


def test_the_last_line_fits_into_what_the_operator_reads_of_a_log(end_with):
    _, output, errors = end_with(InfrastructureError("€" * 100_000))
    assert len(errors) > 100_000
    assert RunEnd.last_of(output[-15_000:]).message == RunEnd.of(5, "€" * 100_000).message


def test_a_config_that_cannot_be_read_has_an_end_too(tmp_path):
    file = tmp_path / "runtime.json"
    file.write_text('{"schemaVersion": 99}')
    done = subprocess.run([sys.executable, "-m", "rlhf_runtime", str(file)], capture_output=True, text=True)
    assert done.returncode == 2
    end = RunEnd.last_of(done.stdout + "a supervisor's own last word\n")
    assert (end.exit_code, end.reason, end.message) == (2, "BadInput", done.stderr.strip())
    assert "schemaVersion: got 99" in end.message


def test_a_person_who_mistyped_is_not_told_twice(tmp_path):
    master, slave = os.openpty()
    command = [sys.executable, "-m", "rlhf_runtime", str(tmp_path / "nowhere.json")]
    done = subprocess.run(command, stdout=slave, stderr=subprocess.PIPE, text=True)
    os.close(slave)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    with pytest.raises(OSError, match="Input/output error"):  # the terminal was closed with nothing on it
        os.read(master, 1)
    os.close(master)


@pytest.mark.parametrize("log", ["", "step 1/3", '{"step": 1}\n', '{"end": 5}', '{"end": {"exitCode": 1}', "{"])
def test_a_log_without_an_end_has_none(log):
    assert RunEnd.last_of(log) is None
