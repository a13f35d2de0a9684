"""From a plan to Kubernetes objects. Pure: the same plan, owner and number give the same objects.

    objects = render(plan_cluster(job), Owner(uid, name, namespace), cluster=1).objects

One kind a file: `configmap` holds the RuntimeConfig, `networkpolicy` closes the cluster to others, `raycluster` and
`pods` make the machines. `merge` lays a pod-template override over them.
"""

from rlhf_operator.manifests.names import (
    CLUSTER_LABEL,
    JOB_LABEL,
    MANAGER,
    POOL_LABEL,
    cluster_name,
    labels_of,
    submission_id,
)
from rlhf_operator.manifests.render import ENTRYPOINT, Manifest, Owner, Rendered, render

__all__ = [
    "CLUSTER_LABEL",
    "ENTRYPOINT",
    "JOB_LABEL",
    "MANAGER",
    "Manifest",
    "Owner",
    "POOL_LABEL",
    "Rendered",
    "cluster_name",
    "labels_of",
    "render",
    "submission_id",
]
