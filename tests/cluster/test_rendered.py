"""What is rendered, on a real API server: it is admitted, scheduled onto its pools, and KubeRay calls it ready."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane, GpuNodes
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest
from rlhf_operator.manifests import render

EXAMPLES = Path(__file__).parents[2] / "examples"
TAINTS = ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},)
CLAIMS = ("models", "data", "checkpoints")


@contextmanager
def claims(cluster: ControlPlane, namespace: str) -> Iterator[None]:
    """Bound claims that every node can mount."""
    shape = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    objects: list[dict[str, Any]] = []
    for name in CLAIMS:
        volume, claim = {"name": f"{namespace}-{name}"}, {"name": name, "namespace": namespace}
        source = {"hostPath": {"path": "/srv"}, "claimRef": claim, "capacity": {"storage": "1Ti"}}
        asked = {"resources": {"requests": {"storage": "1Ti"}}, "volumeName": volume["name"]}
        objects.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": volume, "spec": shape | source})
        objects.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": claim, "spec": shape | asked})
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    try:
        yield
    finally:
        cluster.kubectl("delete", "pv", "--wait=false", *(f"{namespace}-{name}" for name in CLAIMS))


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_admitted_where_pods_have_to_be_restricted(
    api_server: ControlPlane, namespace: str, file: Path
) -> None:
    api_server.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    api_server.kubectl("create", "serviceaccount", "default", "-n", namespace, check=False)  # a controller makes it
    *objects, cluster = render(plan_cluster(read_manifest(file), "runtime:1"), None, 1).objects
    for group in [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]:
        described = {"generateName": "ray-", **group["template"]["metadata"]}
        objects.append({"apiVersion": "v1", "kind": "Pod", "metadata": described, "spec": group["template"]["spec"]})
    document = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    strict = ("--dry-run=server", "--validate=strict", "-n", namespace, "-f", "-")
    told = api_server.kubectl("create", *strict, stdin=document)
    assert told.count(" created (server dry run)") == len(objects)


@pytest.mark.parametrize(
    ("example", "pools"),
    [
        ("02-disaggregated", {"train": "cpu", "rollout": "cpu", "reward": "cpu"}),
        ("11-8xh100-colocated", {"gpu": "h100"}),
        ("12-multi-node-disaggregated", {"train": "h100", "rollout": "a100", "cpu": "cpu"}),
    ],
)
def test_an_example_is_admitted_as_restricted_and_gets_ready_on_its_pools(
    cluster: ControlPlane, namespace: str, example: str, pools: dict[str, str]
) -> None:
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    plan = plan_cluster(read_manifest(EXAMPLES / f"{example}.yaml"), "runtime:1")
    made = render(plan, None, 1)
    nodes = [
        GpuNodes(f"{namespace}-h100", 2, labels={"gpu": "h100"}, taints=TAINTS),
        GpuNodes(f"{namespace}-a100", labels={"gpu": "a100"}, taints=TAINTS),
        GpuNodes(f"{namespace}-cpu", gpus=0),
    ]
    with cluster.nodes(*nodes), claims(cluster, namespace):
        document = json.dumps({"apiVersion": "v1", "kind": "List", "items": made.objects})
        for _ in range(2):  # a second time changes nothing
            told = cluster.kubectl(
                "apply", "--server-side", "--validate=strict", "-n", namespace, "-f", "-", stdin=document
            )
        where = ("-n", namespace, f"raycluster/{made.name}")
        cluster.kubectl("wait", "--for=jsonpath={.status.state}=ready", "--timeout=90s", *where)
        assert cluster.get("raycluster", made.name, namespace)["metadata"]["generation"] == 1, told
        pods = cluster.items("pod", namespace, f"ray.io/cluster={made.name}")
        on = {pod["metadata"]["labels"]["ray.io/group"]: pod["spec"]["nodeName"].split("-")[-2] for pod in pods}
        assert on == {"headgroup": "cpu", **pools}
        assert len(pods) == 1 + sum(pool.nodes for pool in plan.job.spec.node_pools)
        service = cluster.get("service", f"{made.name}-head-svc", namespace)["spec"]
        assert {"dashboard": 8265, "progress": 8090}.items() <= {p["name"]: p["port"] for p in service["ports"]}.items()
        [head] = cluster.items("pod", namespace, f"ray.io/cluster={made.name},ray.io/node-type=head")
        assert service["selector"].items() <= head["metadata"]["labels"].items()
        cluster.kubectl("delete", "--wait=false", "-n", namespace, "-f", "-", stdin=document)
