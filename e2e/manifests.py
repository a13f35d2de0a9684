"""The examples as they run on a cluster of small nodes."""

from pathlib import Path
from typing import Any

from live_cluster import LiveCluster
from ruamel.yaml import YAML

EXAMPLES = Path(__file__).parents[1] / "examples"
CHECKPOINTS = "/checkpoints"
"""Where pods see the claim `checkpoints`."""

Json = dict[str, Any]

SMALL: Json = {"containers": [{"name": "ray", "resources": {"requests": {"cpu": "100m"}}}]}
"""Pods that share a node's few CPUs: the examples ask for a CPU a process."""


def example(file: str, cluster: LiveCluster, steps: int, **spec: Any) -> Json:
    """An example that trains for so many steps in pods on the cluster's GPU nodes; all else is as it is written.

    Args:
        file: Its file's name.
        cluster: The cluster.
        steps: Steps.
        spec: Fields of the spec that it has besides.
    """
    job: Json = YAML(typ="safe").load(EXAMPLES / file)
    place = cluster.on_gpu_nodes | {"podTemplate": {"spec": SMALL}}
    job["spec"] |= {"head": {"memory": "3Gi", **place}, **spec}
    job["spec"]["training"]["steps"] = steps
    for pool in job["spec"]["nodePools"]:
        pool |= place
    return job


def kept(every_steps: int) -> Json:
    """Fields of a spec by which checkpoints go to the claim `checkpoints`."""
    return {
        "storage": [{"name": "checkpoints", "persistentVolumeClaim": "checkpoints", "mountPath": CHECKPOINTS}],
        "checkpoint": {"path": f"{CHECKPOINTS}/job", "everySteps": every_steps},
    }
