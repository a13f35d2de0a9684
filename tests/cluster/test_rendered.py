"""What is rendered, on a real API server."""

import json
from pathlib import Path

import pytest
from control_plane import ControlPlane
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest
from rlhf_operator.manifests import render

EXAMPLES = Path(__file__).parents[2] / "examples"


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
