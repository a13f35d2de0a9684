"""What is done to a job that trains, and what it is to say of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from live_cluster import OPERATOR, LiveCluster
from manifests import CHECKPOINTS
from running_job import RunningJob

AWAY_SECONDS = 30
"""How long Ray's job API is away in the fault that a job does not notice."""
PATIENCE_SECONDS = 45
"""How long the operator lets it be away in the one that costs a cluster."""
EVICTION_SECONDS = 300
"""How long Kubernetes leaves the pods of a node that it has taken for lost."""


def nothing(job: RunningJob) -> None:
    """What most faults need to be over."""


@dataclass(frozen=True)
class Fault:
    """Something that is done to a job, and how it is told."""

    inject: Callable[[RunningJob], Any]
    reason: str | None
    """Of the failure; None where the job does not notice."""
    kind: str = "Infrastructure"
    """Whose limit it counts against."""
    clusters: int = 1
    """RayClusters that the job has had in the end."""
    steps: int = 16
    """How long it trains, so that it has not ended before it can notice."""
    mend: Callable[[RunningJob], Any] = nothing
    """Without it no try could succeed; it follows when the fault was told."""
    undo: Callable[[RunningJob], Any] = nothing
    """What the cluster needs afterwards; it comes last, whatever happened."""
    of_kind: bool = True
    """Whether it can be done on kind alone: to its nodes, or to an operator whose settings are ours."""
    rollout_memory: str | None = None
    """What the rollout pod may take, where that matters."""
    megabytes: int | None = None
    """Size of the volume that its checkpoints go to, where it is to be a small one."""


def need_own_operator(cluster: LiveCluster) -> None:
    """Skips a test that kills or scales the operator, where somebody else has installed it."""
    if not cluster.operator_is_ours:
        pytest.skip("an operator that others have installed is neither killed nor scaled")


def kill_operator(job: RunningJob) -> None:
    """Ends the operator as `kill -9` would; its Deployment starts another one."""
    job.cluster.kubectl("delete", "pod", *OPERATOR, "--force", "--grace-period=0")


KILL_DRIVER = """
for process in /proc/[0-9]*; do
  case $(tr '\\0' ' ' <$process/cmdline) in "python -m rlhf_runtime"*) kill -9 ${process#/proc/} ;; esac
done
"""
MEMORY, TAKE_MORE_MEMORY = "4Gi", "head -c 6G /dev/zero | tail"
SIGNAL_DASHBOARD = """
for process in /proc/[0-9]*; do
  case $(tr '\\0' ' ' <$process/cmdline) in
    "bash "*) ;;  # this script, whose text has the name as well
    *dashboard/dashboard.py*) kill -{signal} ${process#/proc/} ;;
  esac
done
"""


def take_more_memory(job: RunningJob) -> None:
    """A process of the rollout pod takes more memory than the pod has, until the kernel ends something."""
    job.run_in("rollout", TAKE_MORE_MEMORY, check=False)


def restart_api_server(job: RunningJob) -> None:
    """Ends the API server's process; the kubelet starts another one."""
    [node] = job.cluster.nodes_of("control-plane")
    before = job.cluster.on_node(node, "pgrep -x kube-apiserver")
    job.cluster.on_node(node, "pkill -9 -x kube-apiserver")
    end = time.monotonic() + 120
    while job.cluster.on_node(node, "pgrep -x kube-apiserver || true") in ("", before) or not job.cluster.answers:
        if time.monotonic() > end:
            raise TimeoutError("the API server did not come back within 120 s")
        time.sleep(1)


def silence_job_api(job: RunningJob) -> None:
    """Stops the process that answers for Ray's jobs, until the job says that it is missed."""
    job.run_in("headgroup", SIGNAL_DASHBOARD.replace("{signal}", "STOP"))
    job.wait("word of the silence", lambda status: "does not answer" in status.get("message", ""))


def silence_job_api_for_a_while(job: RunningJob) -> None:
    """The same, and lets it go on after a while."""
    begin = time.monotonic()
    silence_job_api(job)
    time.sleep(max(begin + AWAY_SECONDS - time.monotonic(), 0))
    job.run_in("headgroup", SIGNAL_DASHBOARD.replace("{signal}", "CONT"))


def silence_job_api_for_ever(job: RunningJob) -> None:
    """The same before an operator of less patience."""
    job.cluster.install_operator(jobApiPatienceSeconds=PATIENCE_SECONDS)
    silence_job_api(job)


def drain(job: RunningJob) -> None:
    """Empties a node that has some of the job's workers and not its head, as before its maintenance."""
    nodes = {pod["spec"]["nodeName"] for pod in job.all_pods()} - {job.node_of("headgroup")}
    patience = ("--timeout=120s", "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    job.cluster.kubectl("drain", nodes.pop(), *patience)


def uncordon(job: RunningJob) -> None:
    """Opens all nodes again."""
    job.cluster.kubectl("uncordon", *job.cluster.nodes_of("worker"))


def stop_kubelet(job: RunningJob) -> None:
    """Stops the kubelet below the rollout pod: Kubernetes takes the node for lost, and the job ends without it."""
    node = job.node_of("rollout")
    job.cluster.on_node(node, "systemctl stop kubelet")
    job.cluster.kubectl("wait", "--for=condition=Ready=unknown", f"node/{node}", "--timeout=180s")
    job.wait_for_end(EVICTION_SECONDS)


def start_kubelets(job: RunningJob) -> None:
    """Starts them again."""
    nodes = job.cluster.nodes_of("worker")
    for node in nodes:
        job.cluster.on_node(node, "systemctl start kubelet")
    job.cluster.kubectl("wait", "--for=condition=Ready", "--timeout=120s", "node", *nodes)


def fill_volume(job: RunningJob) -> None:
    """Leaves no room for the next checkpoint."""
    job.in_reader(f"cat /dev/zero >{CHECKPOINTS}/filler || true")


def empty_volume(job: RunningJob) -> None:
    """Gives the room back."""
    job.in_reader(f"rm {CHECKPOINTS}/filler")


REMOUNT = """
for process in $(grep -l {pod} /proc/[0-9]*/cgroup | cut -d/ -f3); do
  grep -q ' {path} ' /proc/$process/mountinfo || continue  # the pod's own pause
  for _ in $(seq 100); do
    nsenter --target $process --mount mount -o remount,bind,{how} {path} && exit
    sleep 0.1
  done
done
exit 1
"""


def remount(job: RunningJob, how: str) -> None:
    """Changes how the pod that writes checkpoints has their volume; not while it has a file of it open."""
    [pod, *_] = job.pods("train")
    uid = job.cluster.get("pod", pod, job.namespace)["metadata"]["uid"].replace("-", "_")
    job.cluster.on_node(job.node_of("train"), REMOUNT.format(pod=f"pod{uid}", path=CHECKPOINTS, how=how))


def with_operator_as_it_was(job: RunningJob) -> None:
    """The operator with the settings of the other tests."""
    job.cluster.install_operator()


def anywhere(inject: Callable[[RunningJob], Any], reason: str | None, **rest: Any) -> Fault:
    """A fault that needs no more than the right to end pods, an operator of ours too, and processes in them."""
    return Fault(inject, reason, of_kind=False, **rest)


SMOKE = {
    "head pod killed": anywhere(lambda job: job.kill_pods("headgroup"), "HeadLost", clusters=2),
    "rollout pod killed": anywhere(lambda job: job.kill_pods("rollout"), "InfrastructureLost"),
    "driver killed": anywhere(lambda job: job.run_in("headgroup", KILL_DRIVER), "Unexpected", kind="Program"),
    "operator killed during training": anywhere(kill_operator, None),
}
"""The four that happen most."""
FAULTS = SMOKE | {
    "policy worker pod killed": anywhere(lambda job: job.kill_pods("train"), "InfrastructureLost"),
    "out of memory": anywhere(take_more_memory, "InfrastructureLost", rollout_memory=MEMORY),
    "API server restarted": Fault(restart_api_server, None),
    "job API unreachable for 30 s": anywhere(silence_job_api_for_a_while, None, steps=60),
    "job API unreachable for ever": Fault(
        silence_job_api_for_ever, "JobApiUnreachable", clusters=2, steps=100, undo=with_operator_as_it_was
    ),
    "node cordoned and drained": Fault(drain, "InfrastructureLost", steps=80, undo=uncordon),
    "kubelet stopped": Fault(stop_kubelet, None, steps=80, undo=start_kubelets),
    "checkpoint volume full": Fault(fill_volume, "CheckpointFailed", kind="Program", mend=empty_volume, megabytes=64),
    "checkpoint volume read-only": Fault(
        lambda job: remount(job, "ro"), "CheckpointFailed", kind="Program", mend=lambda job: remount(job, "rw")
    ),
}
