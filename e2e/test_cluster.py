"""The cluster that the other tests take for granted, and the operator in it."""

from typing import Any

import yaml
from live_cluster import LiveCluster
from rlhf_operator.manifests.security import CONTAINER_SECURITY, POD_SECURITY

# One pod a node.
POD = """
apiVersion: v1
kind: Pod
metadata: {name: NAME, labels: {apart: "yes"}}
spec:
  restartPolicy: Never
  tolerations: [{key: nvidia.com/gpu, operator: Exists}]
  affinity:
    podAntiAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        - {topologyKey: kubernetes.io/hostname, labelSelector: {matchLabels: {apart: "yes"}}}
  containers:
    - name: main
      resources: {limits: {nvidia.com/gpu: 1}}
      volumeMounts: [{name: checkpoints, mountPath: /checkpoints}]
  volumes:
    - {name: checkpoints, persistentVolumeClaim: {claimName: checkpoints}}
"""
READ = "for _ in $(seq 300); do [[ -s /checkpoints/{0} ]] && break; sleep 1; done; cat /checkpoints/{0}"


def pod(name: str, image: str, script: str) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(POD)
    made["metadata"]["name"] = name
    made["spec"]["securityContext"] = POD_SECURITY
    made["spec"]["containers"][0] |= {
        "image": image,
        "command": ["bash", "-ec", script],
        "securityContext": CONTAINER_SECURITY,
    }
    return made


def test_pods_of_two_nodes_write_to_one_claim(cluster: LiveCluster, namespace: str) -> None:
    image = cluster.images.runtime
    cluster.claim(namespace)
    cluster.create(
        pod("first", image, f"echo one >/checkpoints/one; {READ.format('two')}"),
        pod("second", image, f"{READ.format('one')}; echo two >/checkpoints/two"),
        namespace=namespace,
    )
    pods = [
        cluster.wait_for("pod", name, namespace, lambda found: found["status"]["phase"] in ("Succeeded", "Failed"))
        for name in ("first", "second")
    ]
    assert [found["status"]["phase"] for found in pods] == ["Succeeded", "Succeeded"]
    assert len({found["spec"]["nodeName"] for found in pods}) == 2
    assert [cluster.kubectl("logs", name, "-n", namespace).strip() for name in ("first", "second")] == ["two", "one"]


def test_operator_is_healthy(cluster: LiveCluster) -> None:
    cluster.helm("test", "rlhf-operator", "--timeout=5m")
