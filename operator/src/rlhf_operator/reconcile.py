"""One pass over one job: look, decide, tell, do. Any number of passes over the same world do nothing more."""

import logging
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rlhf_api import SpecError
from rlhf_api.status import RLHFJobStatus

from rlhf_operator.conditions import MESSAGE_LENGTH, is_true
from rlhf_operator.decide import decide
from rlhf_operator.decision import Action, DropCluster, DropJob, Leftover, MakeCluster, Patience, Seen, Submit
from rlhf_operator.events import events_of
from rlhf_operator.kube import (
    EVENTS,
    RAYCLUSTERS,
    RLHFJOBS,
    ConflictError,
    KubeError,
    NotFoundError,
    Object,
    Resource,
    resource_of,
)
from rlhf_operator.kuberay import KIND
from rlhf_operator.manifests import JOB_LABEL, Manifest, cluster_name, entrypoint
from rlhf_operator.metrics import Metrics
from rlhf_operator.observe import JobView, Key, cluster_view, owner_of
from rlhf_operator.ray_jobs import RefusedError, UnreachableError
from rlhf_operator.store import keep_job
from rlhf_operator.surroundings import Surroundings
from rlhf_operator.work_queue import RetrySoon

log = logging.getLogger(__name__)


class NameTakenError(Exception):
    """An object of another has the name that one of ours has to have; the message says what to do."""


class Reconciler:
    """Makes the world as the jobs say, and tells how far it got."""

    def __init__(self, around: Surroundings, metrics: Metrics | None = None) -> None:
        settings = around.settings
        self._around, self._kube, self._store, self._metrics = around, around.kube, around.store, metrics
        self._patience = Patience(
            job_api_seconds=settings.job_api_patience_seconds,
            retry_seconds=settings.retry_delay_seconds,
            follow_seconds=settings.follow_seconds,
        )

    async def reconcile(self, key: Key) -> float | None:
        """Take one job one step further.

        1. look at it, its clusters, and what they give reason to look at
        2. decide, from nothing else
        3. tell it in the status, if there is anything new
        4. do what was decided, which the status names by now
        5. tell what happened as Events

        Returns:
            Seconds until it has to be looked at again; None for not before something changes.

        Raises:
            RetrySoon: when another wrote in between.
            KubeError: when the API server, by its own fault or ours, does not do what it is asked.
            SpecError, NameTakenError, RefusedError, UnreachableError: when an action cannot be done, which the next
                pass tells.
        """
        job = self._store.job(key)
        if job is None:
            return None
        if job.unreadable:
            await self._leave_alone(job, job.unreadable)
            return None
        seen = await self._around.look(job)
        decision = decide(seen, self._patience)
        memory, told = self._around.memory(job), await self._tell(job, decision.status)
        memory.trouble, memory.told = None, seen.now if told else memory.told
        try:
            for action in decision.actions:
                await self._act(seen, decision.status, action)
        finally:
            if told:
                await self._announce(job, decision.status, seen.now)
        return decision.again_seconds

    async def _leave_alone(self, job: JobView, why: str) -> None:
        """Leave a job alone, and say so: without its status nobody knows what of it may run and what may go."""
        log.warning("%s/%s is left alone: %s", job.namespace, job.name, why)
        message = f"The operator leaves this job alone, since it cannot read its status: {why}"[:MESSAGE_LENGTH]
        if job.raw_status.get("message") != message:
            await self._write(job, {"message": message})

    async def _tell(self, job: JobView, status: RLHFJobStatus) -> bool:
        """Write the status if it differs from what is there."""
        patch = status_patch(job.raw_status, status)
        if not patch:
            return False
        await self._write(job, patch)
        if self._metrics:
            ready = is_true(status, "ClusterReady") and not is_true(job.status, "ClusterReady")
            self._metrics.told(job.status, status, ready and not job.status.tries)
        log.info("%s/%s: %s: %s", job.namespace, job.name, status.phase, status.message)
        return True

    async def _write(self, job: JobView, patch: Object) -> None:
        """Merge into the status, of the very version that was looked at."""
        body = {"metadata": {"resourceVersion": job.resource_version}, "status": patch}
        try:
            written = await self._around.call(self._kube.patch, RLHFJOBS, job.namespace, job.name, body, "status")
        except NotFoundError:
            self._store.forget_job(job.key, job.uid)
            raise RetrySoon from None
        except ConflictError:
            fresh = await self._around.call(self._kube.get, RLHFJOBS, job.namespace, job.name)
            if fresh:
                self._store.see_job(keep_job(fresh))
            else:
                self._store.forget_job(job.key, job.uid)
            raise RetrySoon from None
        self._store.see_job(keep_job(written))

    async def _act(self, seen: Seen, status: RLHFJobStatus, action: Action) -> None:
        """Do one thing; why it cannot be done is remembered for the next pass to tell."""
        job = seen.job
        try:
            match action:
                case MakeCluster(number):
                    await self._make_cluster(seen, number)
                case DropCluster(cluster):
                    await self._delete(RAYCLUSTERS, cluster.namespace, cluster.name, cluster.uid)
                    self._store.mark_deleting(cluster)
                case Leftover(kind, name, uid):
                    await self._delete(resource_of({"kind": kind}), job.namespace, name, uid)
                case Submit(submission_id):
                    await self._submit(job, status, submission_id)
                case DropJob():
                    await self._delete(RLHFJOBS, job.namespace, job.name, job.uid)
        except (KubeError, SpecError, NameTakenError, RefusedError, UnreachableError) as error:
            self._around.memory(job).trouble = str(error)
            raise

    async def _delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        await self._around.call(self._kube.delete, resource, namespace, name, uid)

    async def _make_cluster(self, seen: Seen, number: int) -> None:
        """Make a cluster's objects, the RayCluster last and only where there is none: the next pass judges another."""
        job, rendered = seen.job, seen.rendered
        if rendered is None or rendered.name != cluster_name(job.name, number):
            rendered = await self._around.render(job, number)
        for manifest in rendered.around:
            await self._check_owner(job, manifest)
            await self._around.call(self._kube.apply, manifest)
        try:
            made = await self._around.call(self._kube.create, RAYCLUSTERS, rendered.ray_cluster)
        except NotFoundError as error:  # a namespace that is gone has been noticed before
            raise NotFoundError(error.status, error.reason, f"{KIND} is not installed") from None
        except ConflictError:
            there = await self._around.call(self._kube.get, RAYCLUSTERS, job.namespace, rendered.name)
            if there:
                self._store.see_cluster(cluster_view(there))
            raise RetrySoon from None
        self._store.see_cluster(cluster_view(made))

    async def _check_owner(self, job: JobView, manifest: Manifest) -> None:
        """See to it that an object which is there already is the job's own, and stays."""
        name, kind = manifest["metadata"]["name"], manifest["kind"]
        there = await self._around.call(self._kube.get, resource_of(manifest), job.namespace, name)
        if there and owner_of(there) != job.uid:
            raise NameTakenError(f"{kind} {name} is not this job's, which needs the name. Rename it, or the job.")
        if there and "deletionTimestamp" in there["metadata"]:
            raise NameTakenError(f"{kind} {name} is being deleted. Waiting until the name is free.")

    async def _submit(self, job: JobView, status: RLHFJobStatus, submission_id: str) -> None:
        cluster = self._store.cluster((job.namespace, status.ray_cluster or ""))
        if cluster is None:
            raise RetrySoon
        head = await self._around.head(cluster, self._around.memory(job))
        command = entrypoint(submission_id, resume=(status.tries or 1) > 1)
        await self._around.rays.submit(head, submission_id, command, {JOB_LABEL: job.name})

    async def _announce(self, job: JobView, status: RLHFJobStatus, now: datetime) -> None:
        """Create the Events of a change; losing one loses nothing that the status does not tell."""
        for event in events_of(job, status, now):
            try:
                await self._around.call(self._kube.create, EVENTS, event)
            except ConflictError:
                continue
            except KubeError as error:
                log.warning("%s/%s: the event %s was lost: %s", job.namespace, job.name, event["reason"], error)


def status_patch(raw: Mapping[str, Any], status: RLHFJobStatus) -> Object:
    """What to merge into a status so that it reads as it should: new values, and null for what goes. Pure.

    Fields that are unknown at its top are those of another release, which may come back: they stay.
    """
    known = {info.alias for info in RLHFJobStatus.model_fields.values()}
    wanted = status.model_dump(by_alias=True, exclude_none=True, mode="json")
    return merge_patch({key: value for key, value in raw.items() if key in known}, wanted)


def merge_patch(old: Mapping[str, Any], new: Mapping[str, Any]) -> Object:
    """What to merge into a mapping to make it another, by RFC 7396: null for what goes, at every depth. Pure.

    Args:
        old: what is there.
        new: what shall be there; no value of its mappings is None.
    """
    patch: Object = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            patch |= {key: inner} if (inner := merge_patch(before, value)) else {}
        elif value != before:
            patch[key] = value
    return patch
