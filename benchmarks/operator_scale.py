"""What many jobs cost: RLHFJobs to ClusterReady beside the same RayClusters made by hand, on simulated GPU nodes.

A control plane of real processes, the operator as a process beside it. Batches of jobs and batches of bare RayClusters
take turns, so that both meet the same machine and the same number of objects. Afterwards: the operator's writes in
quiet minutes by the API server's audit log, and a restart with every job present.

    python benchmarks/operator_scale.py [--jobs 1000] [--batch 100] [--quiet-minutes 5]
"""

import argparse
import copy
import functools
import json
import os
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from control_plane import ControlPlane, GpuNodes
from control_plane.processes import Process
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "02-disaggregated.yaml"
NAMESPACE = "scale"
JOBS = f"/apis/rlhf-operator.io/v1alpha1/namespaces/{NAMESPACE}/rlhfjobs"
CLUSTERS = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
CLIENTS = 8
PATIENCE = 1800
Object = dict[str, Any]


@functools.cache
def example() -> Object:
    """Read once, as the bare RayClusters' spec is: the benchmark's own work shall be the same for both."""
    job: Object = YAML(typ="safe").load(EXAMPLE)
    return job


def manifest(name: str) -> Object:
    """The second example on GPUs: a head, two GPU pools and a CPU pool, of one node each."""
    job = copy.deepcopy(example())
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    resources = {"cpu": "4", "memory": "8Gi"}
    job["spec"]["image"] = "example.com/rlhf-runtime:test"
    job["spec"]["preRunningDeadlineSeconds"] = 86400
    job["spec"]["nodePools"] = [
        {"name": "train", "nodes": 1, "gpusPerNode": 3, **resources},
        {"name": "rollout", "nodes": 1, "gpusPerNode": 2, **resources},
        {"name": "reward", "nodes": 1, **resources},
    ]
    return job


class Watch(threading.Thread):
    """Follows a collection, and keeps for each object when something was first true of it.

    Attributes:
        seen: Monotonic seconds by mark and name.
    """

    def __init__(self, cluster: ControlPlane, path: str, marks: dict[str, Callable[[Object], bool]]) -> None:
        super().__init__(daemon=True)
        self.cluster, self.path, self.marks = cluster, path, marks
        self.seen: dict[str, dict[str, float]] = {mark: {} for mark in marks}
        self.start()

    def run(self) -> None:
        while True:
            query = {"watch": "true", "timeoutSeconds": "3600"}
            with (
                suppress(httpx.TransportError),  # at the end the API server is gone before the watch is
                self.cluster.api.stream("GET", self.path, params=query, timeout=None) as answer,
            ):
                # A definition that is new is not served at once.
                for line in answer.iter_lines() if answer.is_success else ():
                    self._look(json.loads(line)["object"], time.monotonic())

    def _look(self, found: Object, now: float) -> None:
        name = found["metadata"]["name"]
        for mark, holds in self.marks.items():
            if name not in self.seen[mark] and holds(found):
                self.seen[mark][name] = now

    def wait_for(self, mark: str, names: list[str]) -> float:
        """Waits until a mark holds for all names.

        Returns:
            When the last one was seen.
        """
        end = time.monotonic() + PATIENCE
        seen = self.seen[mark]
        while missing := [name for name in names if name not in seen]:
            if time.monotonic() > end:
                raise SystemExit(f"{len(missing)} of {len(names)} not {mark} within {PATIENCE} s, first {missing[0]}")
            time.sleep(0.05)
        return max(seen[name] for name in names)


def is_ready(found: Object) -> bool:
    return found.get("status", {}).get("state") == "ready"


def holds(condition: str) -> Callable[[Object], bool]:
    def check(found: Object) -> bool:
        conditions = found.get("status", {}).get("conditions", [])
        return any(each["type"] == condition and each["status"] == "True" for each in conditions)

    return check


class Scale:
    """One run: a cluster, an operator, and what was measured of them."""

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.user = "rlhf-operator"
        self.clusters = Watch(cluster, CLUSTERS, {"ready": is_ready})
        self.jobs = Watch(cluster, JOBS, {"told": lambda job: "status" in job, "ready": holds("ClusterReady")})
        self.created: dict[str, float] = {}
        self.metrics = ""

    def start_operator(self) -> Process:
        """The operator as a process of its own."""
        port = free_port()
        self.metrics = f"http://127.0.0.1:{port}/metrics"
        env = {
            "KUBECONFIG": str(self.cluster.kubeconfig_of(self.user)),
            "RLHF_OPERATOR_METRICS_PORT": str(port),
            "RLHF_OPERATOR_HEALTH_PORT": "0",
            "MALLOC_ARENA_MAX": "2",  # as in the operator's image
            # There is no Ray behind the pods, so no driver is ever taken.
            "RLHF_OPERATOR_JOB_API_PATIENCE_SECONDS": "86400",
        }
        operator = Process(
            "operator", [sys.executable, "-m", "rlhf_operator.handlers"], self.folder / "operator.log", env
        )
        operator.start()
        return operator

    def create(self, path: str, objects: list[Object]) -> float:
        """Creates objects side by side, and tells when that began."""

        def post(found: Object) -> None:
            self.created[found["metadata"]["name"]] = time.monotonic()
            answer = self.cluster.api.post(path, json=found)
            if not answer.is_success:
                raise SystemExit(f"{found['metadata']['name']}: {answer.text}")

        begin = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(post, objects))
        return begin

    def direct(self, names: list[str], spec: Object) -> float:
        """Seconds until bare RayClusters are ready."""
        metadata = [{"name": name, "namespace": NAMESPACE} for name in names]
        kind = {"apiVersion": "ray.io/v1", "kind": "RayCluster"}
        begin = self.create(CLUSTERS, [{**kind, "metadata": each, "spec": spec} for each in metadata])
        return self.clusters.wait_for("ready", names) - begin

    def through_jobs(self, names: list[str]) -> float:
        """Seconds until as many jobs are ClusterReady."""
        begin = self.create(JOBS, [manifest(name) for name in names])
        return self.jobs.wait_for("ready", names) - begin

    def reconciles(self) -> float:
        """Passes over jobs that the running operator has done."""
        try:
            text = httpx.get(self.metrics, trust_env=False).text
        except httpx.TransportError:
            return 0
        return sum(float(count) for count in re.findall(r"^rlhf_operator_reconciles_total\S* (\S+)$", text, re.M))

    def writes(self, offset: int) -> dict[str, int]:
        """Requests of the operator since a moment, by which something would change: how many of which kind."""
        asked = [request for request in self.cluster.requests(self.user, offset) if request.writes]
        return dict(Counter(f"{request.verb} {request.resource}" for request in asked))


def cpu_seconds(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(process: Process, field: str) -> float:
    """Resident memory now (VmRSS) or at its highest (VmHWM)."""
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"no {field} of the operator: it has ended")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def percentile(samples: list[float], share: float) -> float:
    ordered = sorted(samples)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def spec_of(scale: Scale) -> Object:
    """The RayCluster that the operator makes for the manifest, from a first job."""
    scale.through_jobs(["first"])
    (found,) = scale.cluster.api.get(CLUSTERS).json()["items"]
    spec: Object = copy.deepcopy(found["spec"])
    # Nobody shall take the copies for the operator's own.
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        group["template"].get("metadata", {}).pop("labels", None)
    return spec


def take_turns(scale: Scale, spec: Object, jobs: int, batch: int) -> tuple[list[float], list[float]]:
    """Seconds of each batch: of jobs, and of bare RayClusters."""
    through, direct = [], []
    for index in range(max(jobs // batch, 1)):
        names = [f"job-{index}-{number}" for number in range(min(batch, jobs))]
        bare = [name.replace("job", "bare") for name in names]
        # Who goes first changes, since the second of a pair meets a fuller cluster.
        for kind in ("jobs", "bare") if index % 2 else ("bare", "jobs"):
            if kind == "jobs":
                through.append(scale.through_jobs(names))
            else:
                direct.append(scale.direct(bare, spec))
        print(f"batch {index}: {through[-1]:6.1f} s through jobs, {direct[-1]:6.1f} s bare", flush=True)
    return through, direct


def settle(scale: Scale, operator: Process, jobs: int) -> float:
    """Seconds from an operator's start until it has looked at every job."""
    begin = time.monotonic()
    operator.wait_until("look at every job", lambda: scale.reconciles() >= jobs, seconds=PATIENCE)
    return time.monotonic() - begin


def measure(cluster: ControlPlane, folder: Path, jobs: int, batch: int, quiet_minutes: float) -> Object:
    scale = Scale(cluster, folder)
    operator = scale.start_operator()
    spec = spec_of(scale)
    programs = {**cluster.processes, "operator": operator}
    before = {name: cpu_seconds(process) for name, process in programs.items()}
    through, direct = take_turns(scale, spec, jobs, batch)
    spent = {name: round(cpu_seconds(process) - before[name], 1) for name, process in programs.items()}
    names = [name for name in scale.jobs.seen["ready"] if name != "first"]
    told = [scale.jobs.seen["told"][name] - scale.created[name] for name in names]
    followed = [scale.jobs.seen["ready"][name] - scale.clusters.seen["ready"][f"{name}-1"] for name in names]

    time.sleep(min(60, quiet_minutes * 60))  # whatever the last batch has left to be written
    mark = cluster.audit_size
    time.sleep(quiet_minutes * 60)
    quiet_writes = scale.writes(mark)
    memory, peak = megabytes(operator, "VmRSS"), megabytes(operator, "VmHWM")

    operator.stop(patience=30)
    mark = cluster.audit_size
    operator = scale.start_operator()
    settled = settle(scale, operator, len(names) + 1)
    restart_writes = scale.writes(mark)
    operator.stop(patience=30)
    return {
        "benchmark": "operator_scale",
        "jobs": len(names),
        "ratio": round(sum(through) / sum(direct), 3),
        "ratios": [round(ours / bare, 2) for ours, bare in zip(through, direct, strict=True)],
        "seconds_through_jobs": round(sum(through), 1),
        "seconds_bare": round(sum(direct), 1),
        "created_to_status_p99": round(percentile(told, 0.99), 2),
        "ready_to_status_p50": round(statistics.median(followed), 2),
        "ready_to_status_p99": round(percentile(followed, 0.99), 2),
        "memory_mb": round(memory),
        "memory_peak_mb": round(peak),
        "quiet_minutes": quiet_minutes,
        "quiet_writes": sum(quiet_writes.values()),
        "quiet_writes_by_kind": quiet_writes,
        "restart_seconds": round(settled, 1),
        "restart_writes": sum(restart_writes.values()),
        "restart_writes_by_kind": restart_writes,
        "cpu_seconds": spent,
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=100, help="jobs created at once")
    parser.add_argument("--quiet-minutes", type=float, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-scale-") as name, ControlPlane.start(Path(name)) as cluster:
        cluster.start_controllers()
        cluster.apply(ROOT / "crds")
        cluster.kubectl("create", "namespace", NAMESPACE)
        # Five GPUs a job, and as many a bare RayCluster; the size of a node changes nothing here.
        nodes = max(arguments.jobs // 20, 1)
        with cluster.nodes(GpuNodes("gpu", count=nodes, gpus=512, cpu="10k", memory="64Ti")):
            result = measure(cluster, Path(name), arguments.jobs, arguments.batch, arguments.quiet_minutes)
    for key, value in result.items():
        print(f"{key:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
