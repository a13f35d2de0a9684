"""When a spec is read anew.

What may change while a job runs is the API server's to say (the CRD's rules); limits, deadlines and `suspend` take
effect on the next pass. The rest describes the cluster: a new description takes effect with the next cluster.
"""

from rlhf_api.status import RLHFJobStatus

from rlhf_operator.conditions import is_true


def must_be_read(status: RLHFJobStatus, generation: int) -> bool:
    """Whether a spec has to be planned again: it was never accepted, or it changed since.

    A spec that was refused is planned on every pass, since the operator's settings or KubeRay may have changed.
    """
    return status.observed_generation != generation or not is_true(status, "Accepted")
