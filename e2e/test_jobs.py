"""The first two examples train in pods, are followed, and leave nothing behind."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from live_cluster import LiveCluster
from manifests import CHECKPOINTS, example, kept
from running_job import RLHF, RunningJob, holds

STEPS = 20


def rlhf(job: RunningJob, *arguments: str, code: int = 0) -> str:
    """What the command prints, or its errors where it is to end badly."""
    command = [RLHF, *arguments, "--kubeconfig", job.cluster.kubeconfig, "-n", job.namespace]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, f"rlhf {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stderr if code else done.stdout


@pytest.mark.parametrize(("file", "sync_path"), [("01-quickstart.yaml", "shm"), ("02-disaggregated.yaml", "gloo")])
def test_an_example_trains_in_pods(
    cluster: LiveCluster, namespace: str, file: str, sync_path: str, tmp_path: Path
) -> None:
    manifest = example(file, cluster, STEPS, **kept(every_steps=10))
    name = manifest["metadata"]["name"]
    job = RunningJob(cluster, namespace, name)
    cluster.claim(namespace)
    (tmp_path / "job.json").write_text(json.dumps(manifest))
    rlhf(job, "apply", str(tmp_path / "job.json"))

    job.wait_for_step(1)
    row = cluster.kubectl("get", "rlhf", name, "-n", namespace, "--no-headers").split()
    assert row[1] == "Training", f"{row}: the columns are Name, Phase, Step, Reward, ..."
    assert 0 < int(row[2]) < STEPS
    assert 0 <= float(row[3]) <= 1
    workers = cluster.items("pods", namespace, "ray.io/node-type=worker")
    assert len(workers) == len(manifest["spec"]["nodePools"])

    log = rlhf(job, "logs", "-f", name)
    status = job.wait("end", lambda status: holds(status, "Succeeded"), seconds=60)
    assert json.loads(log.splitlines()[-1])["end"]["reason"] == "Completed"
    assert (status["progress"]["step"], status["phase"], status["failures"]) == (STEPS, "Succeeded", [])

    rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["sync_path"] for row in rows} == {sync_path}
    rewards = [row["reward_mean"] for row in rows]
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3]), f"no learning: {rewards}"
    files = job.in_reader(f"cd {CHECKPOINTS}/job; ls; ls run/model")
    assert {f"step-{STEPS:06}", "model.safetensors"} <= set(files.split())

    job.wait("end of its cluster", lambda status: "rayCluster" not in status, seconds=60)
    kept_log = job.in_reader(f"cat {CHECKPOINTS}/job/run/driver.log")
    beginning, *lines = kept_log.splitlines()
    assert beginning.startswith(f"--- {name}-1-1, ")
    assert [int(step) for step in re.findall(rf"(?m)^step (\d+)/{STEPS} ", kept_log)] == list(range(1, STEPS + 1))
    rays_own, _, written = log.partition("Running entrypoint for job ")
    assert lines == written.splitlines()[1:], f"what follows on Ray's own lines: {rays_own}"
    assert "job/run/driver.log on PersistentVolumeClaim checkpoints" in rlhf(job, "logs", name, code=1)
    cluster.kubectl("delete", "pod", "reader", "-n", namespace)

    rlhf(job, "delete", name, "--wait")
    kinds = "rayclusters,pods,configmaps,networkpolicies,secrets,services"
    left = set(cluster.kubectl("get", kinds, "-n", namespace, "-o", "name").split())
    assert left <= {"configmap/kube-root-ca.crt"}
