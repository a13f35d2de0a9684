"""Runs of `rlhf run`, as a person starts them: real processes, which can be told from all others."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import ruamel.yaml
from rlhf_api.runtime_config import LocalNode
from rlhf_runtime.single_controller import LocalCluster, RayResourcePool, reserve

EXAMPLES = Path(__file__).parents[2] / "examples"
RLHF = Path(sys.executable).parent / "rlhf"
Job = dict


class Run:
    """One `rlhf run` in a folder of its own, whose processes can be told from all others by a mark they inherit."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder = folder
        self.name = job["metadata"]["name"]
        self.mark = f"RLHF_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        with (folder / "job.yaml").open("w") as file:
            ruamel.yaml.YAML().dump(job, file)
        self.process = subprocess.Popen(
            [RLHF, "run", "job.yaml"],
            cwd=folder,
            env=os.environ | {name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output: list[str] = []

    def wait_for_line(self, part: str) -> None:
        for line in self.process.stdout:
            self.output.append(line)
            if part in line:
                return
        pytest.fail(f"the run ended before it said {part!r}:\n{self.text}")

    def finish(self, timeout: float = 240) -> int:
        rest, _ = self.process.communicate(timeout=timeout)
        self.output.append(rest)
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self.output)

    @property
    def results(self) -> Path:
        return self.folder / "runs" / self.name

    @property
    def metrics(self) -> list[dict]:
        return self._lines("metrics.jsonl")

    @property
    def samples(self) -> list[dict]:
        return self._lines("samples.jsonl")

    @property
    def summary(self) -> dict:
        return json.loads(next(line for line in reversed(self.text.splitlines()) if line.startswith("{")))

    def _lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.results / name).read_text().splitlines()]

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

    def pids(self, name: str) -> list[int]:
        return [pid for pid, command in self.processes().items() if command.startswith(name)]

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def assert_nothing_left(self, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == {}


@pytest.fixture(scope="session")
def example() -> Callable[[str], Job]:
    """Reads an example by its name."""
    yaml = ruamel.yaml.YAML(typ="safe", pure=True)
    return lambda name: yaml.load((EXAMPLES / f"{name}.yaml").read_text())


@pytest.fixture(scope="session")
def small(example: Callable[[str], Job]) -> Callable[..., Job]:
    """Makes an example one of fewer and smaller steps."""

    def _small(steps: int, name: str = "01-quickstart") -> Job:
        job = example(name)
        job["spec"]["training"]["steps"] = steps
        job["spec"]["data"] |= {"batchSize": 8, "maxResponseLength": 8}
        job["spec"]["algorithm"]["ppo"].pop("miniBatchSize", None)
        return job

    return _small


@contextmanager
def runs_that_end() -> Iterator[Callable[[Path, Job], Run]]:
    """Starts runs; nothing of them is left afterwards."""
    runs: list[Run] = []

    def start(folder: Path, job: Job) -> Run:
        runs.append(Run(folder, job))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture(scope="module")
def start_in() -> Iterator[Callable[[Path, Job], Run]]:
    """Starts a run in a folder, for all tests of a file."""
    with runs_that_end() as start:
        yield start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Job], Run]]:
    """Starts a run in the test's own folder."""
    with runs_that_end() as start:
        yield partial(start, tmp_path)


@pytest.fixture(scope="session")
def free_port() -> Iterator[Callable[[], int]]:
    """Finds ports for programs that want to be told one; each is held against other tests until the end."""
    held: list[socket.socket] = []

    def find() -> int:
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the program does: it shall have the port
        holder.bind(("", 0))
        held.append(holder)
        return int(holder.getsockname()[1])

    yield find
    for holder in held:
        holder.close()


@pytest.fixture(scope="session")
def local_nodes() -> list[LocalNode]:
    """Two local nodes with a CPU and two fake GPUs each."""
    return [LocalNode(pool=name, device="cuda", resources={"CPU": 1.0, "GPU": 2.0, name: 1.0}) for name in ("a", "b")]


@pytest.fixture(scope="module")
def cluster(local_nodes: list[LocalNode]) -> Iterator[None]:
    """A real Ray of these nodes."""
    with LocalCluster(local_nodes):
        yield


@pytest.fixture(scope="module")
def pool(cluster: None) -> Iterator[RayResourcePool]:
    """Half of each node."""
    pool = RayResourcePool("actor", 2, {"CPU": 0.5, "GPU": 1.0}, "STRICT_SPREAD")
    reserve([pool], 30)
    yield pool
    pool.remove()
