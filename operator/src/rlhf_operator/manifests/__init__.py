"""From a plan to Kubernetes objects. Pure: the same plan, owner and number give the same objects.

    objects = render(plan_cluster(job), Owner(uid, name, namespace), cluster=1).objects

One kind a file: `configmap` holds the RuntimeConfig, `networkpolicy` closes the cluster to others, `raycluster` makes
its groups of `pods`, whose `resources` are one arithmetic for Kubernetes and Ray. `override` lays a user's pod template
over ours by the rules of `merge`, as far as `security` allows. `pruned` tells what an installed KubeRay would drop.
"""

from rlhf_operator.manifests.base import Manifest, Owner
from rlhf_operator.manifests.names import (
    CLUSTER_LABEL,
    JOB_LABEL,
    MANAGER,
    QUEUE_LABEL,
    cluster_name,
    labels_of,
    submission_id,
)
from rlhf_operator.manifests.pruned import check_pruned
from rlhf_operator.manifests.render import Rendered, entrypoint, render

__all__ = [
    "CLUSTER_LABEL",
    "JOB_LABEL",
    "MANAGER",
    "Manifest",
    "Owner",
    "QUEUE_LABEL",
    "Rendered",
    "check_pruned",
    "cluster_name",
    "entrypoint",
    "labels_of",
    "render",
    "submission_id",
]
