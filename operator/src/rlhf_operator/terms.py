"""The part of a spec that is looked at on every pass, read once a generation. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError
from rlhf_api import RLHFJob, RLHFJobSpec
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
    has_checkpoints: bool
    """Whether it writes some, which the next cluster of its name resumes from."""
    pools: Sequence[NodePool]

    @property
    def gpus(self) -> int:
        """GPUs of all pools together."""
        return sum(pool.nodes * pool.gpus_per_node for pool in self.pools)


def terms_of(job: RLHFJob) -> Terms:
    """The terms of a job."""
    return _terms(partial(getattr, job.spec))


def rough_terms(spec: Mapping[str, Any]) -> Terms:
    """The terms of a job whose spec cannot be read as a whole, as the one of a newer or an older release.

    A job that runs has to be followed and ended all the same. Each field is read by itself; what cannot be read has its
    default, and pools that cannot be read are none.
    """
    return _terms(partial(_field, spec))


def _terms(read: Callable[[str], Any]) -> Terms:
    return Terms(
        suspend=read("suspend"),
        backoff_limit=read("backoff_limit"),
        infrastructure_backoff_limit=read("infrastructure_backoff_limit"),
        active_deadline_seconds=read("active_deadline_seconds"),
        pre_running_deadline_seconds=read("pre_running_deadline_seconds"),
        ttl_seconds_after_finished=read("ttl_seconds_after_finished"),
        has_checkpoints=read("checkpoint") is not None,
        pools=read("node_pools"),
    )


def _field(spec: Mapping[str, Any], name: str) -> Any:
    info = RLHFJobSpec.model_fields[name]
    adapter: TypeAdapter[Any] = TypeAdapter(Annotated[info.annotation, info])  # type: ignore[arg-type]
    try:
        return adapter.validate_python(spec[info.alias or name], by_alias=True, by_name=False)
    except (KeyError, ValidationError):
        return () if info.is_required() else info.get_default(call_default_factory=True)
