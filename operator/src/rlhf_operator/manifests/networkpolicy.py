"""The NetworkPolicy that closes a cluster to all but its own pods, the operator, and the API server where it is told.

Policies add up: whoever else is to reach the pods, such as a Prometheus elsewhere, gets a policy of its own.
"""

from collections.abc import Sequence

from rlhf_operator.kuberay import CLUSTER_LABEL
from rlhf_operator.manifests.base import Manifest, Place, metadata
from rlhf_operator.manifests.ports import DASHBOARD, METRICS, PROGRESS, Port

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
OPERATOR_LABELS = {"app.kubernetes.io/name": "rlhf-operator"}


def network_policy(place: Place, operator_namespace: str | None, api_server: Sequence[str]) -> Manifest:
    """The policy of a cluster.

    Args:
        place: the cluster.
        operator_namespace: where the operator's pod runs, which is told by its label too; None for any namespace.
        api_server: networks that the API server's service proxy comes from, as CIDRs; none keeps it out.
    """
    pods = {"matchLabels": {CLUSTER_LABEL: place.name}}
    namespaces = {"matchLabels": {NAMESPACE_LABEL: operator_namespace}} if operator_namespace else {}
    operator = {"namespaceSelector": namespaces, "podSelector": {"matchLabels": OPERATOR_LABELS}}
    ingress = [{"from": [{"podSelector": pods}]}, {"from": [operator], "ports": _ports(DASHBOARD, PROGRESS, METRICS)}]
    if api_server:
        proxy = [{"ipBlock": {"cidr": network}} for network in api_server]
        ingress.append({"from": proxy, "ports": _ports(DASHBOARD, PROGRESS)})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(place),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _ports(*ports: Port) -> list[Manifest]:
    return [{"protocol": "TCP", "port": port.name} for port in ports]
