"""Names and labels of everything that belongs to a job, the same on every pass."""

JOB_LABEL = "rlhf-operator.io/job"
CLUSTER_LABEL = "rlhf-operator.io/cluster"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Stands on the one object that a queue may hold back: here the RayCluster."""
MANAGER = "rlhf-operator"
"""Value of `app.kubernetes.io/managed-by` of what the operator makes, and field manager of all that it writes."""


def cluster_name(job: str, cluster: int) -> str:
    """Name of a job's RayCluster, its ConfigMap and its NetworkPolicy; clusters count from 1."""
    return f"{job}-{cluster}"


def submission_id(job: str, cluster: int, try_: int) -> str:
    """Ray's id of one try; tries count from 1 on each cluster."""
    return f"{cluster_name(job, cluster)}-{try_}"


def labels_of(job: str, cluster: int) -> dict[str, str]:
    """Labels of each child of a job."""
    return {
        "app.kubernetes.io/name": "rlhf-job",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/managed-by": MANAGER,
        JOB_LABEL: job,
        CLUSTER_LABEL: str(cluster),
    }
