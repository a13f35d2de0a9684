"""What a driver writes is in its run folder as well, whatever becomes of it."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from rlhf_api.run_end import RunEnd
from rlhf_runtime.driver_log import DriverLog

BEGINNING = r"--- \S+, \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
# A run of two steps with another trainer, which then ends as its last argument says.
RUN = """
import os, signal, sys, time, types, warnings
from rlhf_runtime import __main__ as program, preflight
from rlhf_runtime.report import StepRecord

def train(config, prompts, report, found):
    report.start()
    for step in (1, 2):
        print(f"a library prints {step}")
        report.step(StepRecord({"step": step, "reward_mean": 0.5, "weight_version": step}, [], []))
    exec(ending)
    report.close()

ending = sys.argv.pop()
sys.modules["rlhf_runtime.trainer"] = types.SimpleNamespace(train=train)
preflight.preflight = lambda config, meanwhile: None
program.SHUTDOWN_SECONDS = 0.1
sys.exit(program.main())
"""


@pytest.fixture
def command(make_config, tmp_path):
    """The command that runs RUN in a run folder."""

    def command(ending: str, *arguments: str) -> list[str]:
        config = make_config(runDir=str(tmp_path), observability={"tensorboard": False})
        file = tmp_path / "runtime.json"
        file.write_text(config.model_dump_json(by_alias=True))
        return [sys.executable, "-c", RUN, str(file), *arguments, ending]

    return command


@pytest.fixture
def run(command, tmp_path):
    """Runs RUN: its process, ended, and what is in the log."""

    def run(ending: str, *arguments: str, stderr: int = subprocess.PIPE):
        done = subprocess.run(
            command(ending, *arguments), stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
        )
        return done, (tmp_path / "driver.log").read_text()

    return run


def test_the_log_has_all_that_is_written_in_its_order(run):
    done, log = run("warnings.warn('loud')", stderr=subprocess.STDOUT)
    beginning, *lines = log.splitlines()
    assert re.fullmatch(BEGINNING, beginning)
    assert lines == done.stdout.splitlines()
    assert [line for line in lines if line.startswith("step ")] == lines[1:4:2]
    assert RunEnd.last_of(log).reason == "Completed"


def test_each_try_has_a_beginning_with_its_name(run):
    run("raise ValueError('no room')", "--try", "tiny-1-1")
    _, log = run("", "--try", "tiny-1-2")
    tries = re.split(r"(?m)^--- (\S+), .*Z\n", log)
    assert tries[1::2] == ["tiny-1-1", "tiny-1-2"]
    assert [RunEnd.last_of(text).message for text in tries[2::2]] == ["Unexpected ValueError: no room", ""]
    assert "\nUnexpected ValueError: no room\n" in tries[2]


def test_a_driver_that_is_killed_loses_none_of_its_lines(run):
    done, log = run("sys.stderr.write('its last words'); os.kill(os.getpid(), signal.SIGKILL)", "--try", "first")
    assert done.returncode == -signal.SIGKILL
    assert log.splitlines()[1:] == [*done.stdout.splitlines(), "its last words"]
    _, log = run("", "--try", "second")
    assert re.search(r"(?m)^--- second, ", log), "the second begins on a line of its own"


def test_a_run_that_is_cut_short_has_its_end_in_the_log(run):
    done, log = run("try: signal.raise_signal(signal.SIGTERM)\nexcept KeyboardInterrupt: signal.pause()")
    assert done.returncode == 143
    assert RunEnd.last_of(log) == RunEnd.last_of(done.stdout)
    assert "Stopped by SIGTERM.\n" in log


def test_a_terminal_has_its_live_view_and_the_log_plain_lines(command, tmp_path):
    master, slave = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI")}
    environment |= {"TERM": "xterm-256color", "FORCE_COLOR": "1"}
    process = subprocess.Popen(command(""), stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    seen = b""
    with suppress(OSError):  # the last writer is gone
        while part := os.read(master, 65536):
            seen += part
    os.close(master)
    assert process.wait() == 0
    log = (tmp_path / "driver.log").read_text()
    assert b"\x1b[?25l" in seen
    assert "\x1b" not in log
    assert len(re.findall(r"(?m)^step \d/12  reward 0.500", log)) == 2
    assert RunEnd.last_of(log).reason == "Completed"


def test_a_log_that_cannot_be_written_ends_no_run_and_hides_nothing(command, tmp_path):
    (tmp_path / "driver.log").symlink_to("/dev/full")
    done = subprocess.run(command(""), capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == f"{tmp_path}/driver.log: not all of this log is kept there (No space left on device)\n"
    assert len(re.findall(r"(?m)^step ", done.stdout)) == 2
    assert RunEnd.last_of(done.stdout).reason == "Completed"


def test_a_folder_with_checkpoints_of_another_run_is_not_written_to(make_config, tmp_path):
    (tmp_path / "step-000001").mkdir()
    config = make_config(runDir=str(tmp_path / "run"), checkpoint={"path": str(tmp_path)})
    file = tmp_path / "runtime.json"
    file.write_text(config.model_dump_json(by_alias=True))
    command = [sys.executable, "-m", "rlhf_runtime", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, json.loads(done.stdout)["end"]["reason"]) == (2, "BadInput")
    assert not (tmp_path / "run").exists()


def test_streams_are_given_back(tmp_path):
    before = sys.stdout, sys.stderr
    with DriverLog() as log:
        log.begin(tmp_path / "driver.log", "tiny")
        assert sys.stdout is not before[0]
        assert sys.stdout.isatty() == before[0].isatty()
    assert (sys.stdout, sys.stderr) == before
