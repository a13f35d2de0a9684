"""What the kernel tells of real processes."""

import os
import signal
import subprocess
import sys

import pytest
from rlhf_runtime.single_controller import probe
from rlhf_runtime.single_controller.probe import ProcessId


@pytest.mark.parametrize("name", ["a b", "x) R 1 2 (y"])
def test_a_process_is_read_whatever_its_name(name: str) -> None:
    rename = f"import ctypes, time; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", rename], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        reading = probe.Reading.of(process.pid)
        process.kill()
    assert reading.parent == os.getpid()
    assert reading.states <= {"S", "R"}


def test_a_number_given_to_a_later_process_is_not_taken_for_the_worker() -> None:
    assert probe.examine(ProcessId(os.getpid(), 1), ("waiting", "working")).state == "gone"
    assert probe.examine(probe.this_process(), ()).state in ("waiting", "working")


def test_a_stopped_sibling_is_found_and_ended() -> None:
    look = (
        "import subprocess, sys; from rlhf_runtime.single_controller.probe import examine_siblings\n"
        "print(examine_siblings().pid)"
    )
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    assert int(found) == sleeper.pid
    assert sleeper.wait(10) == -signal.SIGKILL
