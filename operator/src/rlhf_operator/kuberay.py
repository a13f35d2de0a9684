"""KubeRay's own words: kinds, groups, labels and annotations that it and the operator have to agree on."""

API_VERSION, KIND = "ray.io/v1", "RayCluster"
HEAD_GROUP = "headgroup"
"""Name of the head's group."""
CLUSTER_LABEL, GROUP_LABEL = "ray.io/cluster", "ray.io/group"
POD_LABELS = (CLUSTER_LABEL, GROUP_LABEL, "ray.io/node-type", "ray.io/identifier", "ray.io/is-ray-node")
"""Labels that it sets on each pod of a cluster; nothing can override them."""
STAY_LOST = "ray.io/disable-provisioned-head-restart"
"""Annotation that keeps it from replacing a lost head by a blank one."""
LEAST_RAY = (2, 53)
"""Oldest Ray that jobs may have. With token authentication KubeRay makes no pod of one below 2.52, and tells so by an
Event alone; the header in which a token passes the API server's proxy came to Ray while that one was released."""
