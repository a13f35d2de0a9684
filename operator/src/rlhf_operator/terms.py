"""The part of a spec that is looked at on every pass, read once a generation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_api import RLHFJob
from rlhf_api.pools import NodePool


@dataclass(frozen=True)
class Terms:
    """On what terms a job runs: limits, deadlines, and the machines it asks for."""

    suspend: bool
    backoff_limit: int
    infrastructure_backoff_limit: int
    active_deadline_seconds: int | None
    pre_running_deadline_seconds: int
    ttl_seconds_after_finished: int | None
    pools: Sequence[NodePool]

    @property
    def gpus(self) -> int:
        """GPUs of all pools together."""
        return sum(pool.nodes * pool.gpus_per_node for pool in self.pools)


def terms_of(job: RLHFJob) -> Terms:
    """The terms of a job."""
    spec = job.spec
    return Terms(
        suspend=spec.suspend,
        backoff_limit=spec.backoff_limit,
        infrastructure_backoff_limit=spec.infrastructure_backoff_limit,
        active_deadline_seconds=spec.active_deadline_seconds,
        pre_running_deadline_seconds=spec.pre_running_deadline_seconds,
        ttl_seconds_after_finished=spec.ttl_seconds_after_finished,
        pools=spec.node_pools,
    )
