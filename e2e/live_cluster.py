"""A cluster whose pods really run, with the operator in it."""

import json
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from control_plane import Cluster

CHART = Path(__file__).parents[1] / "charts" / "rlhf-operator"
OPERATOR_NAMESPACE = RELEASE = "rlhf-operator"
OPERATOR = ("-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/component=operator")
"""Arguments of kubectl that choose the operator's pods."""
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
        engine: Program whose containers kind's nodes are; none on a cluster that is not kind's.
        operator_is_ours: Whether the tests have installed the operator; somebody else's stays as it is.
    """

    def __init__(self, kubeconfig: Path, folder: Path, programs: dict[str, Path], images: Images) -> None:
        super().__init__(kubeconfig, folder, programs["kubectl"])
        self._helm = programs["helm"]
        self.images = images
        self.volumes: Path | None = None
        self.storage_class: str | None = None
        self.engine: str | None = None
        self.operator_is_ours = False

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

    @property
    def _api_servers(self) -> list[str]:
        """Addresses of the API servers; on kind, and without an overlay network, their proxy speaks from there."""
        slices = self.items("endpointslices", selector="kubernetes.io/service-name=kubernetes")
        return sorted({address for each in slices for end in each["endpoints"] for address in end["addresses"]})

    def install_operator(self, **settings: float) -> None:
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
            "settings": {"defaultImage": self.images.runtime, "apiServerCidrs": self._api_servers} | settings,
        }
        file = self.folder / "values.json"  # JSON is YAML too
        file.write_text(json.dumps(values))
        patience = ("--wait", "--timeout=5m")
        self.helm("upgrade", "--install", "--create-namespace", *patience, f"--values={file}", RELEASE, CHART)

    def pull_images(self) -> None:
        """Has kind's GPU nodes pull what is tested, which takes minutes: no test's clock runs meanwhile."""
        wait = {"command": ["sleep", "infinity"]}
        containers = [{"name": name, "image": image} | wait for name, image in vars(self.images).items()]
        labels = {"app": "images"}
        pods = {"metadata": {"labels": labels}, "spec": self.on_gpu_nodes | {"containers": containers}}
        pods["spec"]["terminationGracePeriodSeconds"] = 0
        spec = {"selector": {"matchLabels": labels}, "template": pods}
        daemon_set = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "images"}, "spec": spec}
        self.create(daemon_set, namespace=OPERATOR_NAMESPACE)
        self.kubectl("rollout", "status", "daemonset/images", "--timeout=900s", "-n", OPERATOR_NAMESPACE)
        self.kubectl("delete", "daemonset/images", "--wait=false", "-n", OPERATOR_NAMESPACE)

    @property
    def answers(self) -> bool:
        """Whether the API server does."""
        return self.kubectl("get", "--raw", "/readyz", check=False) == "ok"

    def nodes_of(self, role: str) -> list[str]:
        """Names of kind's nodes: of the `control-plane`, or each `worker`."""
        nodes = self.kubectl("get", "nodes", "-l", "kubernetes.io/hostname", "-o", "name").split()
        names = [name.removeprefix("node/") for name in nodes if "kwok" not in name]
        return [name for name in names if ("control-plane" in name) == (role == "control-plane")]

    def on_node(self, node: str, script: str) -> str:
        """Runs a script on one of kind's nodes as root.

        Raises:
            RuntimeError: When it fails, with what it said.
        """
        done = subprocess.run([str(self.engine), "exec", node, "bash", "-ec", script], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"node {node}: {script}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout.strip()

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

    def claim(self, namespace: str, name: str = "checkpoints", megabytes: int | None = None) -> None:
        """Makes a claim of a volume that pods on all nodes may write at once; it goes with the test's namespace.

        Args:
            namespace: The test's namespace.
            name: Name of the claim.
            megabytes: Size of a volume that can be filled, which is in one node's memory: all pods that have it are
                there. On kind alone.
        """
        spec: Json = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
        if self.volumes:
            (self.volumes / namespace / name).mkdir(parents=True)
            node = None
            if megabytes:
                node = self.nodes_of("worker")[0]
                self.on_node(node, f"mount -t tmpfs -o size={megabytes}m tmpfs {NODE_VOLUMES / namespace / name}")
            self.create(_shared_volume(namespace, name, node), namespace=namespace)
            spec |= {"storageClassName": "", "volumeName": f"{namespace}-{name}"}
        elif self.storage_class:
            spec["storageClassName"] = self.storage_class
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.create(claim, namespace=namespace)

    @contextmanager
    def new_namespace(self) -> Iterator[str]:
        """A namespace under the `restricted` standard; it is gone, with its volumes, when the context ends.

        Whatever happens there, the operator's log is to have no traceback, and no word of a status that was pruned.
        """
        name = f"e2e-{secrets.token_hex(4)}"
        begin = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.kubectl("create", "namespace", name)
        try:
            self.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
            yield name
        finally:
            # Waited for, as the next test needs what this one's pods hold.
            self.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s")
            self._drop_volumes(name)
        log = self.kubectl("logs", *OPERATOR, "--tail=-1", f"--since-time={begin}", check=False)
        complaints = [line for line in log.splitlines() if "Traceback" in line or "inconsistenc" in line]
        assert not complaints, f"the operator's log: {complaints}"

    def _drop_volumes(self, namespace: str) -> None:
        self.kubectl("delete", "persistentvolume", "-l", f"{OWNER}={namespace}")
        if self.volumes:
            for node in self.nodes_of("worker"):
                self.on_node(node, f"umount {NODE_VOLUMES / namespace}/* 2>/dev/null || true")
            shutil.rmtree(self.volumes / namespace, ignore_errors=True)


def _shared_volume(namespace: str, name: str, node: str | None) -> Json:
    """A folder of all nodes, or of one, as a volume. `local`, unlike `hostPath`, is given to a pod's fsGroup."""
    where = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    anywhere = {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{name}", "labels": {OWNER: namespace}},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": "1Gi"},
            "claimRef": {"namespace": namespace, "name": name},
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(NODE_VOLUMES / namespace / name)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [where if node else anywhere]}]}},
        },
    }
