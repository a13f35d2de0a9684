"""Workers of a real run are killed or stopped at random moments: each time the run ends in time and says who and why.

    RLHF_CHAOS_MOMENTS=10 RLHF_CHAOS_SEED=7 pytest --log-cli-level=INFO tests/integration/test_chaos.py

draws as many moments as asked for, in both examples, killing and stopping, and tells how long each run took to end. A
seed always draws the same moments.
"""

import logging
import os
import random
import re
import signal
import time
from dataclasses import dataclass

import pytest

SEED = int(os.environ.get("RLHF_CHAOS_SEED", "1"))
COUNT = int(os.environ.get("RLHF_CHAOS_MOMENTS", "2"))
BOUND_SECONDS = 30
"""From the signal to the end of the run."""
WORKERS = {
    "01-quickstart": {
        "all/training": "ray::PolicyCriticReferenceWorker",
        "all/rollout": "ray::RolloutWorker",
        "all/reward": "ray::RewardWorker",
    },
    "02-disaggregated": {
        "actor/training": "ray::PolicyReferenceWorker",
        "critic/training": "ray::CriticWorker",
        "rollout/rollout": "ray::RolloutWorker",
        "reward/reward": "ray::RewardWorker",
    },
}
"""How the processes of each worker group call themselves, by example."""
SPANS = {"a step": (0.0, 0.8), "a sync": (0.8, 1.0)}
"""Which share of a step's time is meant: its sync comes last."""
logger = logging.getLogger(__name__)

GOT = {signal.SIGKILL: ("got a dead worker (", "SIGKILL"), signal.SIGSTOP: ("got a stopped worker (",)}


@dataclass(frozen=True)
class Moment:
    """What happens to whom, and when."""

    example: str
    signum: signal.Signals
    group: str
    place: str
    """`start`, or a part of the third step."""
    delay: float
    """Seconds from the begin of the start, or share of a step's time from the end of the second step."""

    def __str__(self) -> str:
        return f"{self.signum.name} of {self.group} of {self.example} in {self.place}, {self.delay:.2f}"

    def wait(self, run) -> None:
        """Until it has come. It is random, so there is nothing else to wait for."""
        if self.place == "start":
            run.wait_for_line("Starting group")
            time.sleep(self.delay)
            return
        run.wait_for_line("step 1/")
        begin = time.monotonic()
        run.wait_for_line("step 2/")
        time.sleep(self.delay * (time.monotonic() - begin))


def draw(seed: int, number: int) -> list[Moment]:
    """Random moments in start and training: the examples in turn, kills and stops of each in turn."""
    chance = random.Random(seed)
    examples = list(WORKERS)
    moments = []
    for index in range(number):
        example = examples[index % 2]
        signum = (signal.SIGKILL, signal.SIGSTOP)[(index + index // 2) % 2]
        place = chance.choice(["start", *SPANS])
        delay = chance.uniform(*SPANS.get(place, (0.0, 20.0)))
        moments.append(Moment(example, signum, chance.choice(list(WORKERS[example])), place, delay))
    return moments


def worker(run, title: str) -> int:
    """A process with such a title, which may still have to start."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if pids := run.pids(title):
            return pids[-1]
        time.sleep(0.05)
    pytest.fail(f"no process {title}:\n{run.text}")


@pytest.mark.parametrize("moment", draw(SEED, COUNT), ids=str)
def test_a_lost_worker_ends_the_run_in_time_and_is_named(start, small, moment: Moment) -> None:
    job = small(1000, moment.example)
    job["spec"]["data"] |= {"batchSize": 16, "maxResponseLength": 16}
    run = start(job)
    moment.wait(run)
    pid = worker(run, WORKERS[moment.example][moment.group])
    begin = time.monotonic()
    os.kill(pid, moment.signum)
    code = run.finish(timeout=120)
    seconds = time.monotonic() - begin
    logger.info("seed %d, %s: ended after %.1f s\n%s", SEED, moment, seconds, run.text)
    assert code == 5, run.text
    assert re.search(rf"group `{moment.group}`, rank \d \(pid {pid} on node ", run.text), run.text
    assert all(part in run.text for part in GOT[moment.signum]), run.text
    assert "Traceback" not in run.text
    assert "raylet" not in run.text
    assert seconds < BOUND_SECONDS
    run.assert_nothing_left()
