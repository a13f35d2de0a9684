"""Workers of a real run are killed or stopped at random moments: each time the run ends in time and says who and why.

    RLHF_CHAOS_MOMENTS=10 RLHF_CHAOS_SEED=7 pytest --log-cli-level=INFO tests/integration/test_chaos.py

draws as many moments as asked for, killing and stopping in turn, and tells how long each run took to end. A seed always
draws the same moments.
"""

import logging
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ruamel.yaml

SEED = int(os.environ.get("RLHF_CHAOS_SEED", "1"))
COUNT = int(os.environ.get("RLHF_CHAOS_MOMENTS", "2"))
BOUND_SECONDS = 30
"""From the signal to the end of the run."""
QUICKSTART = Path(__file__).parents[2] / "examples" / "01-quickstart.yaml"
RLHF = Path(sys.executable).parent / "rlhf"
WORKERS = {
    "all/training": "ray::PolicyCriticReferenceWorker",
    "all/rollout": "ray::RolloutWorker",
    "all/reward": "ray::RewardWorker",
}
"""How the process of each worker group calls itself."""
logger = logging.getLogger(__name__)

GOT = {signal.SIGKILL: ("got a dead worker (", "SIGKILL"), signal.SIGSTOP: ("got a stopped worker (",)}


@dataclass(frozen=True)
class Moment:
    """What happens to whom, and when."""

    signum: signal.Signals
    group: str
    after: str
    """The line of the run's output that is waited for."""
    delay: float
    """Seconds from that line to the signal."""

    def __str__(self) -> str:
        return f"{self.signum.name} of {self.group} {self.delay:.1f} s after {self.after!r}"


def draw(seed: int, number: int) -> list[Moment]:
    """Random moments in start and training, kills and stops in turn."""
    chance = random.Random(seed)
    moments = []
    for index in range(number):
        signum = (signal.SIGKILL, signal.SIGSTOP)[index % 2]
        after, longest = chance.choice([("Starting group", 20.0), ("step 1", 3.0), ("step 2", 3.0), ("step 3", 3.0)])
        moments.append(Moment(signum, chance.choice(list(WORKERS)), after, chance.uniform(0.0, longest)))
    return moments


class Run:
    """One `rlhf run`, whose processes can be told from all others by a mark that they inherit."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"RLHF_TEST_MARK={uuid.uuid4().hex}"
        yaml = ruamel.yaml.YAML()
        job = yaml.load(QUICKSTART.read_text())
        job["spec"]["training"]["steps"] = 1000
        job["spec"]["data"] |= {"batchSize": 16, "maxResponseLength": 16}
        del job["spec"]["algorithm"]["ppo"]["miniBatchSize"]
        with (folder / "job.yaml").open("w") as file:
            yaml.dump(job, file)
        name, value = self.mark.split("=")
        self.process = subprocess.Popen(
            [RLHF, "run", "job.yaml"],
            cwd=folder,
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def wait_for_line(self, part: str) -> None:
        for line in self.process.stdout:
            self.output += line
            if part in line:
                return
        pytest.fail(f"the run ended before it said {part!r}:\n{self.output}")

    def processes(self) -> dict[int, str]:
        """Command lines of living processes that carry the mark, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue  # it ended while we looked
        return found

    def worker(self, title: str) -> int:
        """The process of a worker, which may still have to start."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for pid, command in self.processes().items():
                if command.startswith(title):
                    return pid
            time.sleep(0.05)
        pytest.fail(f"no process {title}:\n{self.output}")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    for pid in run.processes():
        os.kill(pid, signal.SIGKILL)
    run.process.wait()


@pytest.mark.parametrize("moment", draw(SEED, COUNT), ids=str)
def test_a_lost_worker_ends_the_run_in_time_and_is_named(run: Run, moment: Moment) -> None:
    run.wait_for_line(moment.after)
    time.sleep(moment.delay)  # the moment is random, not awaited
    pid = run.worker(WORKERS[moment.group])
    begin = time.monotonic()
    os.kill(pid, moment.signum)
    rest, _ = run.process.communicate(timeout=120)
    seconds = time.monotonic() - begin
    told = run.output + rest
    logger.info("seed %d, %s: ended after %.1f s\n%s", SEED, moment, seconds, rest)
    assert run.process.returncode == 5, told
    assert f"group `{moment.group}`, rank 0 (pid {pid} on node " in told
    assert all(part in told for part in GOT[moment.signum]), told
    assert "Traceback" not in told
    assert "raylet" not in told
    assert seconds < BOUND_SECONDS
    deadline = time.monotonic() + 10
    while (left := run.processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == {}
