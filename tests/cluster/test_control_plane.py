"""The control plane that the other tests stand on does what a cluster does."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from control_plane import Cluster, ControlPlane, GpuNodes

TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def ray_cluster(name: str, namespace: str, gpus: int = 8) -> dict[str, Any]:
    def template(resources: dict[str, str]) -> dict[str, Any]:
        container = {"name": "ray", "image": "ray", "resources": {"requests": resources, "limits": resources}}
        tolerations = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
        return {"spec": {"containers": [container], "tolerations": tolerations}}

    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "rayVersion": "2.60.0",
            "headGroupSpec": {"rayStartParams": {"num-gpus": "0"}, "template": template({"cpu": "1", "memory": "1Gi"})},
            "workerGroupSpecs": [
                {
                    "groupName": "gpu",
                    "replicas": 1,
                    "minReplicas": 1,
                    "maxReplicas": 1,
                    "rayStartParams": {},
                    "template": template({"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": str(gpus)}),
                }
            ],
        },
    }


def pod_of(cluster: Cluster, namespace: str, selector: str) -> str:
    """Name of a pod, once it is there: `kubectl wait` waits for the creation of what it can name alone."""
    end = time.monotonic() + 60
    while not (pods := cluster.items("pod", namespace, selector)):
        assert time.monotonic() < end, f"no pod {selector} within 60 s"
        time.sleep(0.1)
    return str(pods[0]["metadata"]["name"])


def test_a_ray_cluster_is_scheduled_on_gpu_nodes_and_turns_ready(cluster: ControlPlane, namespace: str) -> None:
    with cluster.nodes(GpuNodes(f"{namespace}-gpu", taints=(TAINT,)), GpuNodes(f"{namespace}-cpu", gpus=0)):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(ray_cluster("ready", namespace)))
        cluster.kubectl("wait", "--for=condition=HeadPodReady", "--timeout=60s", "-n", namespace, "raycluster/ready")
        cluster.kubectl("wait", "--for=jsonpath={.status.state}=ready", "-n", namespace, "raycluster/ready")
        (worker,) = cluster.items("pod", namespace, "ray.io/node-type=worker")
        assert worker["spec"]["nodeName"] == f"{namespace}-gpu-0"

        # What nobody can hold stays Pending, and the scheduler says why.
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(ray_cluster("large", namespace, gpus=9)))
        large = "ray.io/cluster=large,ray.io/node-type=worker"
        name = pod_of(cluster, namespace, large)
        cluster.kubectl("wait", "--for=condition=PodScheduled=False", "--timeout=60s", "-n", namespace, f"pod/{name}")
        (worker,) = cluster.items("pod", namespace, large)
        assert "Insufficient nvidia.com/gpu" in worker["status"]["conditions"][0]["message"]


def test_what_is_owned_goes_with_its_owner(cluster: ControlPlane, namespace: str) -> None:
    cluster.kubectl("create", "configmap", "owner", "-n", namespace)
    uid = cluster.get("configmap", "owner", namespace)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": uid}
    child = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "child", "namespace": namespace, "ownerReferences": [owner]},
    }
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(child))
    cluster.kubectl("delete", "configmap", "owner", "-n", namespace)
    cluster.kubectl("wait", "--for=delete", "--timeout=60s", "configmap/child", "-n", namespace)


def test_a_service_account_has_its_own_rights_and_name(cluster: ControlPlane, namespace: str) -> None:
    cluster.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    mark = cluster.audit_size
    kubeconfig = cluster.kubeconfig_of_service_account(namespace, "reader")
    refused = cluster.kubectl(f"--kubeconfig={kubeconfig}", "create", "configmap", "x", "-n", namespace, check=False)
    assert "forbidden" in refused
    (write,) = [
        request
        for request in cluster.requests(f"system:serviceaccount:{namespace}:reader", mark)
        if request.writes and request.resource == "configmaps"
    ]
    assert (write.verb, write.namespace, write.code) == ("create", namespace, 403)


@pytest.mark.parametrize("program", ["kube-apiserver", "kuberay"])
def test_a_program_that_was_restarted_goes_on(cluster: ControlPlane, namespace: str, program: str) -> None:
    cluster.restart(program)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(ray_cluster("again", namespace)))
    assert pod_of(cluster, namespace, "ray.io/cluster=again,ray.io/node-type=head")


@pytest.mark.parametrize(
    ("label", "statuses"), [("waiting", "containerStatuses"), ("init-waiting", "initContainerStatuses")]
)
def test_a_pod_can_be_told_to_wait(cluster: ControlPlane, namespace: str, label: str, statuses: str) -> None:
    job = ray_cluster("stuck", namespace)
    reason = {"labels": {f"e2e.rlhf-operator.io/{label}": "ErrImagePull"}}
    job["spec"]["workerGroupSpecs"][0]["template"]["metadata"] = reason
    with cluster.nodes(GpuNodes(f"{namespace}-gpu", taints=(TAINT,))):
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(job))
        cluster.kubectl("wait", "--for=condition=HeadPodReady", "--timeout=60s", "-n", namespace, "raycluster/stuck")
        worker = pod_of(cluster, namespace, "ray.io/cluster=stuck,ray.io/node-type=worker")
        waits = f"--for=jsonpath={{.status.{statuses}[0].state.waiting.reason}}=ErrImagePull"
        cluster.kubectl("wait", waits, "--timeout=60s", "-n", namespace, f"pod/{worker}")
        assert cluster.get("raycluster", "stuck", namespace)["status"].get("readyWorkerReplicas", 0) == 0


def test_a_server_of_the_test_answers_for_a_head(cluster: ControlPlane, namespace: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.headers["X-Ray-Authorization"].encode())

    server = ThreadingHTTPServer((cluster.pod_address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    job = ray_cluster("answers", namespace)
    ports = [{"name": "progress", "containerPort": server.server_port}]
    job["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"] = ports
    try:
        with cluster.nodes(GpuNodes(f"{namespace}-gpu", taints=(TAINT,))):
            cluster.kubectl("apply", "-f", "-", stdin=json.dumps(job))
            cluster.kubectl("wait", "--for=jsonpath={.status.state}=ready", "-n", namespace, "raycluster/answers")
            path = f"/api/v1/namespaces/{namespace}/services/answers-head-svc:progress/proxy/"
            answer = cluster.api.get(path, headers={"X-Ray-Authorization": "Bearer secret"})
            assert answer.text == "Bearer secret"
    finally:
        server.shutdown()
        server.server_close()
