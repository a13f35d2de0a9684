"""A run on a Ray cluster that was there before it, with Ray's token authentication, submitted as the operator does."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rlhf_api import RLHFJob
from rlhf_api.run_end import RunEnd
from rlhf_api.runtime_config import LocalNode
from rlhf_operator.plan import build_plan

TOKEN = "b1946ac92492d2347c6235b4d2611184"
DRIVER = (
    "import sys; from rlhf_runtime import __main__, report; report.PROGRESS_PORT = {port}; sys.exit(__main__.main())"
)
"""The runtime with its endpoint on a port that nobody else on this machine has."""


class Head:
    """The head of a Ray cluster of one node, in a folder of its own."""

    def __init__(self, folder: Path, node: LocalNode, free_port: Callable[[], int]) -> None:
        resources = dict(node.resources)
        cpus, port = resources.pop("CPU"), free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = ["start", "--head", "--block", "--port=0", f"--dashboard-port={port}", f"--num-cpus={cpus:.0f}"]
        command += ["--num-gpus=0", f"--resources={json.dumps(resources)}", f"--temp-dir={folder}"]
        command += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
        command += [f"--object-store-memory={256 * 2**20}", "--disable-usage-stats"]
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        self.log = folder / "head.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [Path(sys.executable).parent / "ray", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"X-Ray-Authorization": f"Bearer {TOKEN}"}
        return httpx.request(method, f"{self.url}{path}", headers=headers, timeout=30, **options)

    def wait_until_it_answers(self, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if self.call("GET", "/api/version").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        pytest.fail(f"Ray's head does not answer:\n{self.log.read_text()}")

    def submit(self, entrypoint: str, submission: str, seconds: float = 120) -> None:
        """Submit; the head answers a while before it has an agent that could start a driver."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.call("POST", "/api/jobs/", json={"entrypoint": entrypoint, "submission_id": submission})
            if "No available agent" not in answer.text or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        assert answer.status_code == 200, answer.text

    def job(self, submission: str) -> dict[str, Any]:
        return self.call("GET", f"/api/jobs/{submission}").json()

    def log_of(self, submission: str) -> str:
        return self.call("GET", f"/api/jobs/{submission}/logs").json()["logs"]

    def wait_for_the_end(self, submission: str, meanwhile: Callable[[], None], seconds: float = 400) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            meanwhile()
            if (job := self.job(submission))["status"] in ("SUCCEEDED", "FAILED", "STOPPED"):
                return job
            time.sleep(0.1)
        pytest.fail(f"{submission} has no end:\n{self.log_of(submission)}")

    def stop(self) -> None:
        self.process.terminate()  # `ray start --block` ends all that it started
        self.process.wait(60)


class Watcher:
    """Asks a driver's endpoint whenever it is called, and keeps what was answered."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.progress: list[dict[str, Any]] = []
        self.refused: set[int] = set()
        self.metrics = ""

    def __call__(self) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            self.refused.add(httpx.get(f"{self._url}/progress").status_code)
            progress = httpx.get(f"{self._url}/progress", headers=headers).json()
            self.metrics = httpx.get(f"{self._url}/metrics", headers=headers).text
            self.progress.append(progress)
        except httpx.TransportError:
            pass  # it is not there yet, or no more


@pytest.fixture(scope="module")
def planned(small) -> Any:
    return build_plan(RLHFJob.parse(small(steps=4)), "/nowhere").config


@pytest.fixture(scope="module")
def head(planned, free_port) -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: it holds sockets
        head = Head(Path(folder), planned.local_nodes[0], free_port)
        try:
            head.wait_until_it_answers()
            yield head
        finally:
            head.stop()


@pytest.fixture(scope="module")
def trained(head, planned, free_port, tmp_path_factory) -> tuple[dict[str, Any], str, Watcher, Path]:
    """A run's job, its log, what its endpoint told meanwhile, and its folder."""
    folder = tmp_path_factory.mktemp("cluster")
    config = planned.model_copy(update={"local_nodes": None, "run_dir": str(folder / "run")})
    (folder / "runtime.json").write_text(config.model_dump_json(by_alias=True))
    watcher = Watcher(free_port())
    head.submit(
        shlex.join(
            [sys.executable, "-c", DRIVER.format(port=watcher._url.rpartition(":")[2]), str(folder / "runtime.json")]
        ),
        "job-1-1",
    )
    job = head.wait_for_the_end("job-1-1", watcher)
    return job, head.log_of("job-1-1"), watcher, folder / "run"


def test_it_trains_to_the_end_and_its_last_line_says_so(trained) -> None:
    job, log, _, folder = trained
    assert job["status"] == "SUCCEEDED", log
    last = json.loads(log.splitlines()[-1])
    assert (last["steps"], last["end"]["reason"]) == (4, "Completed")
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert (folder / "model" / "model.safetensors").exists()


def test_its_progress_was_told_while_it_went_on(trained) -> None:
    _, log, watcher, _ = trained
    steps = [told["step"] for told in watcher.progress]
    assert steps[0] == 0, log
    assert steps == sorted(steps)
    newest = watcher.progress[-1]
    assert newest["step"] >= 1
    assert (newest["steps"], newest["weightVersion"]) == (4, newest["step"])
    measured = re.search(r"^rlhf_step (\d)\.0$", watcher.metrics, re.MULTILINE)
    assert newest["step"] <= int(measured[1]) <= 4  # it was asked for after the progress


def test_without_the_token_neither_ray_nor_the_driver_answers(trained, head) -> None:
    _, log, watcher, _ = trained
    assert watcher.refused == {401}
    assert httpx.get(f"{head.url}/api/jobs/").status_code == 401
    assert TOKEN not in log


def test_it_leaves_the_cluster_as_it_was(trained, head) -> None:
    actors = head.call("GET", "/api/v0/actors?filter_keys=state&filter_predicates=%3D&filter_values=ALIVE").json()
    names = [actor["class_name"] for actor in actors["data"]["result"]["result"]]
    assert [name for name in names if name != "JobSupervisor"] == []


def test_a_mistake_is_told_by_exit_code_and_last_line(head, tmp_path) -> None:
    (tmp_path / "runtime.json").write_text('{"schemaVersion": 99}')
    head.submit(shlex.join([sys.executable, "-m", "rlhf_runtime", str(tmp_path / "runtime.json")]), "job-1-2")
    job = head.wait_for_the_end("job-1-2", lambda: None)
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 2)
    end = RunEnd.last_of(head.log_of("job-1-2"))
    assert end.reason == "BadInput"
    assert "schemaVersion: got 99" in end.message
