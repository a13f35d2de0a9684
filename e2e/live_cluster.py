"""A cluster whose pods really run, with the operator in it."""

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane import Cluster

CHART = Path(__file__).parents[1] / "charts" / "rlhf-operator"
OPERATOR_NAMESPACE = RELEASE = "rlhf-operator"
OWNER = "e2e.rlhf-operator.io/namespace"
"""Label of what is outside a test's namespace and goes with it."""
NODE_VOLUMES = Path("/volumes")
"""Where kind's nodes have the folder that they share."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Images:
    """What is tested, by names that the nodes can pull."""

    runtime: str
    operator: str


class LiveCluster(Cluster):
    """A cluster and its administrator, on kind or anywhere.

    Attributes:
        images: What is tested.
        volumes: Folder of this machine that all nodes share; none on a cluster that is not kind's.
        storage_class: Class of claims where there is no such folder; none for the cluster's default.
    """

    def __init__(self, kubeconfig: Path, folder: Path, programs: dict[str, Path], images: Images) -> None:
        super().__init__(kubeconfig, folder, programs["kubectl"])
        self._helm = programs["helm"]
        self.images = images
        self.volumes: Path | None = None
        self.storage_class: str | None = None

    def helm(self, *arguments: str | Path) -> str:
        """Runs helm as the administrator, in the operator's namespace.

        Raises:
            RuntimeError: When it fails, with what it said.
        """
        command = [self._helm, f"--kubeconfig={self.kubeconfig}", f"--namespace={OPERATOR_NAMESPACE}", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"helm {' '.join(map(str, arguments))}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    @property
    def on_gpu_nodes(self) -> Json:
        """Settings of a pool, or of the head, that put its pods on GPU nodes.

        On kind the head goes there too: two nodes hold the runtime's image then, not three.
        """
        selector = {"nodeSelector": {"pool": "gpu"}} if self.volumes else {}
        return selector | {"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}

    @property
    def operator_installed(self) -> bool:
        """Whether helm knows of the operator here."""
        return RELEASE in json.loads(self.helm("list", "--short", "--output=json"))

    def install_operator(self, **settings: str) -> None:
        """Installs the chart, or upgrades it, and waits until the operator is ready.

        Args:
            settings: Fields of the chart's `settings`; the tested runtime image is that of jobs that name none.
        """
        repository, digest = self.images.operator, ""
        if "@" in repository:
            repository, digest = repository.split("@")
        repository, tag = repository.rsplit(":", 1)
        values = {
            "image": {"repository": repository, "tag": tag, "digest": digest},
            "settings": {"defaultImage": self.images.runtime} | settings,
        }
        file = self.folder / "values.json"  # JSON is YAML too
        file.write_text(json.dumps(values))
        patience = ("--wait", "--timeout=5m")
        self.helm("upgrade", "--install", "--create-namespace", *patience, f"--values={file}", RELEASE, CHART)

    def create(self, *manifests: Json, namespace: str) -> None:
        """Applies manifests in a namespace."""
        self.kubectl(
            *("apply", "--server-side", "--force-conflicts", "-n", namespace, "-f", "-"),
            stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}),
        )

    def wait_for(
        self,
        kind: str,
        name: str,
        namespace: str,
        ready: Callable[[Json], bool],
        seconds: float = 600,
        what: str = "the awaited state",
    ) -> Json:
        """Looks at an object each second until it is as it should be, and returns it.

        Raises:
            TimeoutError: When the time is over; it ends with the object's status.
        """
        end = time.monotonic() + seconds
        while not ready(found := self.get(kind, name, namespace)):
            if time.monotonic() > end:
                status = json.dumps(found.get("status"), indent=2)
                raise TimeoutError(
                    f"{kind} {namespace}/{name}: no {what} within {seconds:.0f} s; its status:\n{status}"
                )
            time.sleep(1)
        return found

    def claim(self, namespace: str, name: str = "checkpoints", size: str = "5Gi") -> None:
        """Makes a claim of a volume that pods on all nodes may write at once; it goes with the test's namespace."""
        spec: Json = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
        if self.volumes:
            (self.volumes / namespace / name).mkdir(parents=True)
            self.create(_shared_volume(namespace, name, size), namespace=namespace)
            spec |= {"storageClassName": "", "volumeName": f"{namespace}-{name}"}
        elif self.storage_class:
            spec["storageClassName"] = self.storage_class
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.create(claim, namespace=namespace)


def _shared_volume(namespace: str, name: str, size: str) -> Json:
    """A folder of all nodes as a volume. `local`, unlike `hostPath`, is given to a pod's fsGroup."""
    any_node = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}", "labels": {OWNER: namespace}},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": size},
            "claimRef": {"namespace": namespace, "name": name},
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(NODE_VOLUMES / namespace / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [any_node]}]}},
        },
    }
