"""A job that is followed from outside while something happens to it."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from live_cluster import Json, LiveCluster
from manifests import CHECKPOINTS

READER = "reader"


@dataclass(frozen=True)
class RunningJob:
    """A job in its namespace."""

    cluster: LiveCluster
    namespace: str
    name: str

    @classmethod
    def start(cls, cluster: LiveCluster, namespace: str, manifest: Json) -> "RunningJob":
        """Applies a job, with a claim for its checkpoints."""
        cluster.claim(namespace)
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

    def pods(self, group: str) -> list[str]:
        """Names of its pods of a node pool; those of the head are `headgroup`."""
        selector = f"rlhf-operator.io/job={self.name},ray.io/group={group}"
        return [pod["metadata"]["name"] for pod in self.cluster.items("pods", self.namespace, selector)]

    def kill_pods(self, group: str) -> None:
        """Ends the pods of a node pool as a lost node would: at once, without a word to their processes."""
        self.cluster.kubectl("delete", "pod", "-n", self.namespace, "--force", "--grace-period=0", *self.pods(group))

    def run_in(self, group: str, script: str) -> str:
        """Runs a script in Ray's container of a node pool's first pod."""
        [pod, *_] = self.pods(group)
        return self.cluster.kubectl("exec", "-n", self.namespace, pod, "-c", "ray", "--", "bash", "-ec", script)

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
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "checkpoints", "mountPath": CHECKPOINTS}],
    }
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
    spec: Json = {
        "terminationGracePeriodSeconds": 0,
        "securityContext": user | {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": READER}, "spec": spec | cluster.on_gpu_nodes}


def holds(status: Json, kind: str) -> bool:
    """Whether a condition holds."""
    return any(each["type"] == kind and each["status"] == "True" for each in status.get("conditions", []))
