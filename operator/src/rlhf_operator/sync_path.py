"""The way that new weights take from the policy to the rollout engines, by where the two were placed."""

from collections.abc import Iterator, Sequence

from rlhf_api import FieldError
from rlhf_api.placement import EPSILON
from rlhf_api.pools import Device
from rlhf_api.roles import Role
from rlhf_api.runtime_config import SyncPath, Transport
from rlhf_api.training import WeightSync

from rlhf_operator.bundles import Bundles

MIB = 1024 * 1024
METHOD = "spec.weightSync.method"

_TRANSPORTS: dict[tuple[Device, bool], tuple[Transport, str]] = {
    ("cuda", True): ("ipc", "take CUDA IPC"),
    ("cpu", True): ("shm", "take shared memory"),
    ("cuda", False): ("nccl", "are broadcast by NCCL"),
    ("cpu", False): ("gloo", "are broadcast by gloo"),
}
"""The transport, and what weights do, by device and by whether memory is shared."""


def sync_path(settings: WeightSync, groups: Sequence[Bundles]) -> SyncPath | list[FieldError]:
    """Choose the transport of weights, or say why there is none. Pure.

    Memory is shared where policy and rollout share a group: that of their GPUs by CUDA IPC, that of their one node on
    CPU. Elsewhere weights are broadcast, by NCCL or gloo.

    Args:
        settings: what the manifest asks for.
        groups: the job's groups, placed. Without policy or rollout among them the list of problems is empty:
            `validate` names the mistake.
    """
    policy, rollout = _holder("policy", groups), _holder("rollout", groups)
    if policy is None or rollout is None:
        return []
    if errors := list(_conflicts(settings, policy, rollout)):
        return errors
    shared = settings.method != "broadcast" and _share_memory(policy, rollout)
    transport, way = _TRANSPORTS[rollout.device, shared]
    asked = "" if settings.method == "auto" else f", as {METHOD} asks"
    return SyncPath(
        transport=transport,
        reason=f"{_where(policy, rollout)}: weights {way}{asked}",
        bucket_bytes=settings.bucket_mib * MIB,
        verify=settings.verify == "checksum",
        timeout_seconds=settings.timeout_seconds,
    )


def _holder(role: Role, groups: Sequence[Bundles]) -> Bundles | None:
    return next((group for group in groups if role in group.group.roles), None)


def _share_memory(policy: Bundles, rollout: Bundles) -> bool:
    return policy is rollout and (rollout.device == "cuda" or rollout.on_one_node)


def _where(policy: Bundles, rollout: Bundles) -> str:
    if policy is not rollout:
        return f"policy runs in {_place(policy)}, rollout in {_place(rollout)}"
    spread = "" if _share_memory(policy, rollout) else f", and its {policy.count} bundles may lie on several nodes"
    return f"policy and rollout share {_place(policy)}{spread}"


def _place(bundles: Bundles) -> str:
    return f"group `{bundles.group.name}` on the `{bundles.device}` pool `{bundles.pool.name}`"


def _conflicts(settings: WeightSync, policy: Bundles, rollout: Bundles) -> Iterator[FieldError]:
    colocated, method = policy is rollout, settings.method
    if policy.device != rollout.device:
        fix = "move one of the two, or set `device` of a pool: weights travel between GPUs or between CPUs"
        got = f"a `{rollout.device}` pool for rollout, a `{policy.device}` pool for policy"
        yield FieldError(f"{rollout.path}.pool", got, "one device for both", fix)
    elif method == "ipc" and not _share_memory(policy, rollout):
        expected = "policy and rollout in one group, to share memory"
        if colocated:
            expected = f"{policy.path} on one node, to share memory: its strategies allow several"
        fix = "use `auto`, or set STRICT_PACK without a fallback" if colocated else "use `auto`, or colocate them"
        yield FieldError(METHOD, f"'{method}'", expected, fix)
    elif method == "broadcast" and colocated and rollout.device == "cuda":
        expected = f"'ipc' or 'auto' for policy and rollout on the GPUs of {policy.path}"
        yield FieldError(METHOD, f"'{method}'", expected, "use `auto`: NCCL refuses two ranks on one GPU")
    elif not colocated and rollout.device == "cuda":
        yield from _shared_gpus(policy, rollout)


def _shared_gpus(policy: Bundles, rollout: Bundles) -> Iterator[FieldError]:
    """Members of an NCCL broadcast that might land on one GPU."""
    beside = policy.gpus if policy.pool is rollout.pool else 1.0
    for other, gpus in (("another engine", rollout.gpus if rollout.count > 1 else 1.0), ("policy", beside)):
        if 0 < rollout.gpus <= 1 - gpus + EPSILON:
            got = f"{rollout.gpus:g}, which leaves room for {other} on an engine's GPU"
            fix = "use 1: NCCL, by which weights are broadcast, refuses two ranks on one GPU"
            yield FieldError(f"{rollout.path}.gpusPerWorker", got, "a GPU for each", fix)
