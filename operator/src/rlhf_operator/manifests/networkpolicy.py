"""The NetworkPolicy that closes a cluster to all but its own pods and the operator.

Policies add up: whoever else is to reach the pods, such as a Prometheus elsewhere, gets a policy of its own.
"""

from rlhf_operator.manifests.base import Manifest, Place, metadata
from rlhf_operator.manifests.ports import DASHBOARD, METRICS, PROGRESS

RAY_CLUSTER_LABEL = "ray.io/cluster"
"""KubeRay's own on each pod of a cluster; nothing can override it."""
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
OPERATOR_LABELS = {"app.kubernetes.io/name": "rlhf-operator"}


def network_policy(place: Place, operator_namespace: str | None) -> Manifest:
    """The policy of a cluster.

    Args:
        place: the cluster.
        operator_namespace: where the operator runs. Where that is not known its pods are told by their label, in
            whatever namespace.
    """
    pods = {"matchLabels": {RAY_CLUSTER_LABEL: place.name}}
    operator: Manifest = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR_LABELS}}
    if operator_namespace:
        operator = {"namespaceSelector": {"matchLabels": {NAMESPACE_LABEL: operator_namespace}}}
    ports = [{"protocol": "TCP", "port": port.name} for port in (DASHBOARD, PROGRESS, METRICS)]
    ingress = [{"from": [{"podSelector": pods}]}, {"from": [operator], "ports": ports}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(place),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }
