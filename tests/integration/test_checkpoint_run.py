"""A whole `rlhf run` killed at random moments and resumed: it ends as one that was never killed, bit for bit.

RLHF_TEST_KILLS=10 kills it ten times instead of twice; RLHF_TEST_SEED=n chooses other moments.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path

import pytest
import ruamel.yaml
from rlhf_runtime.checkpoint.shards import ShardReader
from safetensors.torch import load_file
from torch import equal

RLHF = Path(sys.executable).parent / "rlhf"
KILLS = int(os.environ.get("RLHF_TEST_KILLS", "2"))
SEED = int(os.environ.get("RLHF_TEST_SEED", "0"))
EVERY = 2
STEPS = 4 * EVERY * KILLS
"""Quick steps get further before a kill than slow ones."""
BOUND_SECONDS = 240
"""For a run to say what it is waited for."""

MOMENTS = ("save", "step", "step")
"""What is interrupted, in turn: the writing of a checkpoint, or whatever a step does at a random moment."""

JOB = {
    "apiVersion": "rlhf-operator.io/v1alpha1",
    "kind": "RLHFJob",
    "metadata": {"name": "killed"},
    "spec": {
        "models": {
            "policy": {
                "random": {
                    "architecture": "qwen2",
                    "config": {
                        "hidden_size": 64,
                        "intermediate_size": 128,
                        "num_hidden_layers": 2,
                        "num_attention_heads": 2,
                        "num_key_value_heads": 1,
                        "tie_word_embeddings": True,
                        "max_position_embeddings": 64,
                    },
                }
            }
        },
        "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
        # 7 prompts by 4: epochs end inside batches, and at step 7 with one
        "data": {
            "prompts": {"inline": [f"{n}+{n}=" for n in range(7)]},
            "batchSize": 4,
            "maxPromptLength": 16,
            "maxResponseLength": 16,
        },
        "algorithm": {
            "ppo": {"miniBatchSize": 4, "kl": {"coefficient": 0.1, "adaptive": {"target": 0.01, "horizon": 40}}}
        },
        "rollout": {"samplesPerPrompt": 2},
        "training": {"steps": STEPS, "optimizer": {"learningRate": 1e-3, "warmupSteps": 2 * STEPS}},
        "nodePools": [{"name": "local", "device": "cpu"}],
        "checkpoint": {"everySteps": EVERY, "keep": 2},
    },
}


class Run:
    """One `rlhf run`, whose processes can be told from all others by a mark that they inherit."""

    def __init__(self, folder: Path, *options: str, steps: int = STEPS) -> None:
        self.results = folder / "runs" / "killed"
        self.checkpoints = self.results / "checkpoints"
        self._mark = f"RLHF_TEST_MARK={uuid.uuid4().hex}"
        job = JOB | {"spec": JOB["spec"] | {"training": JOB["spec"]["training"] | {"steps": steps}}}
        with (folder / "job.yaml").open("w") as file:
            ruamel.yaml.YAML().dump(job, file)
        name, value = self._mark.split("=")
        self.process = subprocess.Popen(
            [RLHF, "run", "job.yaml", *options],
            cwd=folder,
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        self.process.wait()
        with self._news:
            self._news.notify_all()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait_for_line(self, start: str) -> None:
        def said() -> bool:
            return any(line.startswith(start) for line in self.lines) or self.process.poll() is not None

        with self._news:
            while not said():
                assert self._news.wait(BOUND_SECONDS), f"no {start!r} in {self.text}"
        assert self.process.poll() is None, f"the run ended before it said {start!r}: {self.text}"

    def wait_for_write(self) -> None:
        """Wait until a checkpoint is being written."""
        deadline = time.monotonic() + BOUND_SECONDS
        while not any(self.checkpoints.glob(".step-*-partial")):
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.text

    def kill(self) -> None:
        """SIGKILL to the process group, and to what Ray put into groups of its own."""
        with suppress(ProcessLookupError):  # it ended too early, which is told elsewhere
            os.killpg(self.process.pid, signal.SIGKILL)
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                continue  # it ended while we looked
        self.process.wait()
        self._reader.join()

    def finish(self) -> str:
        """Wait for the end of a run that succeeds, and give what it said."""
        code = self.process.wait(timeout=BOUND_SECONDS)
        self._reader.join()
        assert code == 0, self.text
        return self.text

    def records(self, name: str) -> list[dict]:
        """A file's lines, without what depends on the time that things took."""
        lines = [json.loads(line) for line in (self.results / name).read_text().splitlines()]
        timed = ("time/", "tokens_per_second", "object_store_bytes")
        return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("unbroken"))
    run.finish()
    return run


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run after its kills and one resumption more than that, which has one step more to do and does them all."""
    folder = tmp_path_factory.mktemp("broken")
    chance = random.Random(SEED)
    done = 0
    for number, moment in enumerate(islice(cycle(MOMENTS), KILLS)):
        run = Run(folder, *(["--resume"] if number else []), steps=STEPS - 1)
        try:
            interrupt(run, moment, max(done, EVERY) + EVERY, chance)
        finally:
            run.kill()
        if number:
            assert f"Goes on from step {done}: " in run.text
        done = newest(run.checkpoints)
    run = Run(folder, "--resume")
    run.finish()
    return run


def interrupt(run: Run, moment: str, saved: int, chance: random.Random) -> None:
    """Come to a moment after step `saved`, whose checkpoint is complete or about to be; the one before is complete."""
    if moment == "save":
        run.wait_for_line(f"step {saved}/")
        run.wait_for_write()
        return
    run.wait_for_line(f"Checkpoint of step {saved}:")
    threading.Event().wait(chance.uniform(0, 0.6))  # about as long as a step takes


def newest(checkpoints: Path) -> int:
    return max((int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*")), default=0)


def test_weights_are_those_of_a_run_that_was_never_killed(unbroken: Run, broken: Run) -> None:
    one, other = (load_file(run.results / "model" / "model.safetensors") for run in (unbroken, broken))
    assert one.keys() == other.keys()
    assert [name for name in one if not equal(one[name], other[name])] == []


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_so_are_critic_and_optimizers(unbroken: Run, broken: Run, role: str) -> None:
    with (
        ShardReader(unbroken.checkpoints / f"step-{STEPS:06d}", role, 1) as one,
        ShardReader(broken.checkpoints / f"step-{STEPS:06d}", role, 1) as other,
    ):
        assert one.shapes == other.shapes
        assert [name for name in one.shapes if not equal(one.read(name), other.read(name))] == []


def test_so_is_every_number_and_every_sample_of_every_step(unbroken: Run, broken: Run) -> None:
    assert [line["step"] for line in broken.records("metrics.jsonl")] == list(range(1, STEPS + 1))
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert broken.records(name) == unbroken.records(name)


def test_the_summary_tells_of_all_steps(broken: Run) -> None:
    assert json.loads(broken.lines[-1])["steps"] == STEPS
    events = json.loads((broken.results / "timeline.json").read_text())
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == set(range(1, STEPS + 1))
