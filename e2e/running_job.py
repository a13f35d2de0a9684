"""A job that is followed from outside while something happens to it."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from live_cluster import Json, LiveCluster
from manifests import CHECKPOINTS
from rlhf_operator.manifests.security import CONTAINER_SECURITY, POD_SECURITY

READER = "reader"
RLHF = Path(sys.executable).with_name("rlhf")
"""The command, as it is installed beside this Python."""


@dataclass(frozen=True)
class RunningJob:
    """A job in its namespace."""

    cluster: LiveCluster
    namespace: str
    name: str

    @classmethod
    def start(cls, cluster: LiveCluster, namespace: str, manifest: Json, megabytes: int | None = None) -> "RunningJob":
        """Applies a job, with a claim for its checkpoints, of few megabytes if that is asked for."""
        cluster.claim(namespace, megabytes=megabytes)
        cluster.create(manifest, namespace=namespace)
        return cls(cluster, namespace, manifest["metadata"]["name"])

    def wait(self, what: str, holds: Callable[[Json], bool], seconds: float = 600) -> Json:
        """Waits until something holds of its status, and returns that.

        Raises:
            TimeoutError: When the time is over; it ends with the status.
        """
        found = self.cluster.wait_for(
            "rlhf", self.name, self.namespace, lambda job: holds(job.get("status", {})), seconds, what
        )
        status: Json = found["status"]
        return status

    def wait_for_step(self, step: int) -> Json:
        """Waits until so many steps are done."""
        return self.wait(f"step {step}", lambda status: status.get("progress", {}).get("step", 0) >= step)

    def wait_for_end(self, seconds: float = 900) -> Json:
        """Waits until it has succeeded or failed."""
        return self.wait("end", lambda status: status.get("phase") in ("Succeeded", "Failed"), seconds)

    def all_pods(self) -> list[Json]:
        """Its pods."""
        return self.cluster.items("pods", self.namespace, f"rlhf-operator.io/job={self.name}")

    def pods(self, group: str) -> list[str]:
        """Names of its pods of a node pool; those of the head are `headgroup`."""
        selector = f"rlhf-operator.io/job={self.name},ray.io/group={group}"
        return [pod["metadata"]["name"] for pod in self.cluster.items("pods", self.namespace, selector)]

    def ready_time(self) -> str:
        """When the last of its pods got ready."""
        conditions = [condition for pod in self.all_pods() for condition in pod["status"]["conditions"]]
        return max(each["lastTransitionTime"] for each in conditions if each["type"] == "Ready")

    def kill_pods(self, group: str) -> None:
        """Ends the pods of a node pool as a lost node would: at once, without a word to their processes."""
        self.cluster.kubectl("delete", "pod", "-n", self.namespace, "--force", "--grace-period=0", *self.pods(group))

    def node_of(self, group: str) -> str:
        """Name of the node that a node pool's first pod is on."""
        [pod, *_] = self.pods(group)
        node: str = self.cluster.get("pod", pod, self.namespace)["spec"]["nodeName"]
        return node

    def run_in(self, group: str, script: str, check: bool = True) -> str:
        """Runs a script in Ray's container of a node pool's first pod; with `check` it has to end well."""
        [pod, *_] = self.pods(group)
        command = ("exec", "-n", self.namespace, pod, "-c", "ray", "--", "bash", "-ec", script)
        return self.cluster.kubectl(*command, check=check)

    def delete(self) -> None:
        """Deletes it, without a word to what it has made."""
        self.cluster.kubectl("delete", "rlhf", self.name, "-n", self.namespace)

    def suspend(self, suspended: bool) -> None:
        """Asks for its suspension, or its resumption."""
        patch = json.dumps({"spec": {"suspend": suspended}})
        self.cluster.kubectl("patch", "rlhf", self.name, "-n", self.namespace, "--type=merge", "-p", patch)

    def left(self) -> set[str]:
        """What the operator and KubeRay have made in its namespace that is still there."""
        kinds = "rayclusters,pods,configmaps,networkpolicies,secrets,services"
        found = set(self.cluster.kubectl("get", kinds, "-n", self.namespace, "-o", "name").split())
        return found - {"configmap/kube-root-ca.crt", f"pod/{READER}"}

    def wait_until_gone(self, seconds: float) -> None:
        """Waits until nothing is left of what was made for it.

        Raises:
            TimeoutError: When the time is over, with what is left.
        """
        end = time.monotonic() + seconds
        while left := self.left():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name}: after {seconds:.0f} s there is still {', '.join(sorted(left))}")
            time.sleep(1)

    def metrics(self) -> list[Json]:
        """Its rows of metrics, read from the claim by a pod of its own."""
        text = self.in_reader(f"cat {CHECKPOINTS}/job/run/metrics.jsonl")
        return [json.loads(line) for line in text.splitlines()]

    def in_reader(self, script: str) -> str:
        """Runs a script in a pod that has the claim too."""
        if READER not in self.cluster.kubectl("get", "pods", "-n", self.namespace, "-o", "name"):
            self.cluster.create(reader(self.cluster), namespace=self.namespace)
            self.cluster.kubectl("wait", "-n", self.namespace, "--for=condition=Ready", "--timeout=300s", "pod", READER)
        return self.cluster.kubectl("exec", "-n", self.namespace, READER, "--", "bash", "-ec", script)


def reader(cluster: LiveCluster) -> Json:
    """A pod that has the claim and does nothing."""
    container: Json = {
        "name": "main",
        "image": cluster.images.runtime,
        "command": ["sleep", "infinity"],
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [{"name": "checkpoints", "mountPath": CHECKPOINTS}],
    }
    spec: Json = {
        "terminationGracePeriodSeconds": 0,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": READER}, "spec": spec | cluster.on_gpu_nodes}


def holds(status: Json, kind: str) -> bool:
    """Whether a condition holds."""
    return any(each["type"] == kind and each["status"] == "True" for each in status.get("conditions", []))
