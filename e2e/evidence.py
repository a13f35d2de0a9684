"""What a cluster knows of a test that failed."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from live_cluster import OPERATOR_NAMESPACE, LiveCluster

KINDS = "rlhfjobs,rayclusters,pods,services,configmaps,persistentvolumeclaims"
RAY_LOGS = "cd /tmp/ray/session_latest/logs && tail -n 2000 -- *.log *.err *.out"


def collect(cluster: LiveCluster, namespace: str, folder: Path) -> None:
    """Writes objects, their descriptions, events, and the logs of all pods and of Ray into a folder, made anew.

    Args:
        cluster: The cluster.
        namespace: The test's namespace.
        folder: Folder for it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def keep(file: str, *arguments: str) -> str:
        text = cluster.kubectl(*arguments, check=False)
        (folder / file).write_text(text)
        return text

    keep("objects.yaml", "get", KINDS, "-n", namespace, "-o", "yaml")
    keep("overview.txt", "get", KINDS, "-n", namespace, "-o", "wide")
    keep("describe.txt", "describe", "rlhfjobs,rayclusters,pods,persistentvolumeclaims", "-n", namespace)
    keep("events.txt", "get", "events", "-n", namespace, "--sort-by=.lastTimestamp")
    keep("nodes.txt", "describe", "nodes")
    keep("operator.log", "logs", "-n", OPERATOR_NAMESPACE, "-l", "app.kubernetes.io/component=operator", "--tail=-1")
    keep("kuberay.log", "logs", "-A", "-l", "app.kubernetes.io/name=kuberay", "--tail=-1", "--prefix")
    for pod in _pods(cluster, namespace):
        keep(f"{pod}.log", "logs", "-n", namespace, pod, "--all-containers", "--prefix")
    for pod in _pods(cluster, namespace, "ray.io/node-type"):
        keep(f"{pod}.ray.log", "exec", "-n", namespace, pod, "-c", "ray", "--", "bash", "-c", RAY_LOGS)


@contextmanager
def collected(cluster: LiveCluster, namespace: str, folder: Path) -> Iterator[None]:
    """Collects where what is done in this context fails, such as a fixture whose namespace goes with it."""
    try:
        yield
    except Exception as error:
        collect(cluster, namespace, folder)
        error.add_note(f"What the cluster knows of it is in {folder}")
        raise


def _pods(cluster: LiveCluster, namespace: str, selector: str = "") -> list[str]:
    try:
        return [pod["metadata"]["name"] for pod in cluster.items("pods", namespace, selector)]
    except (RuntimeError, json.JSONDecodeError):  # a cluster that does not answer is evidence too
        return []
