"""The operator as a process: the only file that imports kopf, which watches and does nothing else.

    watch events --+
                   +--> store --> queue of keys --> reconcile
    resync --------+

No handler of kopf's writes: there are no timers, daemons or deletion handlers, which would put a finalizer on objects,
and none for changes, which would put an annotation there. Resync is a task of our own.
"""

import asyncio
import logging
import random
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import kopf
from rlhf_api import SpecError

from rlhf_operator.kube import (
    PAGE,
    RAYCLUSTERS,
    RLHFJOBS,
    Kube,
    KubeError,
    Listing,
    NoClusterError,
    NotFoundError,
    Object,
    Resource,
)
from rlhf_operator.manifests import JOB_LABEL, MANAGER
from rlhf_operator.metrics import Health, Metrics
from rlhf_operator.observe import Key, cluster_view
from rlhf_operator.ray_jobs import RayJobs
from rlhf_operator.reconcile import Reconciler
from rlhf_operator.settings import Settings
from rlhf_operator.store import Store, keep_job
from rlhf_operator.surroundings import Surroundings
from rlhf_operator.work_queue import Waits, WorkQueue

T = TypeVar("T")
log = logging.getLogger(__name__)

MISSED_RESYNCS = 3
"""Resyncs that may fail before the operator counts as ill."""


class Operator:
    """The parts put together: what kopf's events and the resync feed."""

    def __init__(self, settings: Settings, kube: Kube) -> None:
        self.settings, self.kube = settings, kube
        self.store, self.metrics = Store(), Metrics()
        self.health = Health(MISSED_RESYNCS * settings.resync_seconds + 30)
        proxied = settings.via_proxy if settings.via_proxy is not None else not kube.in_pod
        self.rays = RayJobs(kube.access() if proxied else None)
        self.around = Surroundings(kube, self.rays, self.store, settings)
        reconciler = Reconciler(self.around, self.metrics)
        waits = Waits(self.metrics.started, self.metrics.finished)
        self.queue = WorkQueue(reconciler.reconcile, settings.max_concurrent, waits)
        self._synced = asyncio.Event()
        self._listed: set[str | None] = set()
        """Namespaces that were listed, None for all: before that, a cluster not heard of yet would count as lost."""
        self._worker: asyncio.Task[None] | None = None
        self._resyncer: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to resync and to work."""
        self.metrics.serve(self.settings.metrics_port)
        self.health.serve(self.settings.health_port)
        self._worker = asyncio.create_task(self._work())
        self._resyncer = asyncio.create_task(self._resync_forever())

    async def stop(self) -> None:
        """End all tasks and connections."""
        tasks = list(filter(None, (self._resyncer, self._worker)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.rays.close()
        self.around.close()

    def see_job(self, obj: Any, gone: bool) -> None:
        """Take an event of a job."""
        key = obj["metadata"]["namespace"], obj["metadata"]["name"]
        if gone:
            self.store.forget_job(key, obj["metadata"]["uid"])
        elif self.store.see_job(keep_job(obj)):
            self._enqueue(key)

    def see_cluster(self, obj: Any, gone: bool) -> None:
        """Take an event of a RayCluster."""
        meta = obj["metadata"]
        if gone:
            self.store.forget_cluster((meta["namespace"], meta["name"]), meta["uid"])
        elif not self.store.see_cluster(cluster_view(obj)):
            return
        job = (meta.get("labels") or {}).get(JOB_LABEL)
        if job:
            self._enqueue((meta["namespace"], job))

    async def resync(self) -> None:
        """List everything once; look at what is news now, and at the rest within the time until the next resync.

        The first time everything is, since a watch may have told of it before anything could be decided.

        A namespace that does not let itself be listed, as one that is gone, hinders no other.

        Raises:
            KubeError: when the API server tells of none.
            RuntimeError: when nothing would be looked at.
        """
        if self._worker and self._worker.done():
            raise RuntimeError("the queue's worker has died")
        namespaces, failures = self.settings.namespaces or (None,), list[KubeError]()
        news: set[Key] = set()
        for namespace in namespaces:
            try:
                news |= await self._resync_namespace(namespace)
            except KubeError as error:
                failures.append(error)
                log.warning("namespace %s was not listed: %s", namespace or "(all)", error)
        if len(failures) == len(namespaces):
            raise failures[-1]
        spread = self.settings.resync_seconds if self._synced.is_set() else 0.0
        self._synced.set()
        for key in self.store.keys:
            self.queue.add(key, 0.0 if key in news else random.uniform(0, spread))
        views = list(self.store.jobs)
        self.around.forget({job.uid for job in views})
        self.metrics.resynced(job.status.phase for job in views)
        self.health.resynced()

    async def _resync_namespace(self, namespace: str | None) -> set[Key]:
        """List one namespace, or all for None; tells whose jobs have news."""
        scope = (namespace,) if namespace else ()
        clusters = await self._list(RAYCLUSTERS, namespace, JOB_LABEL, cluster_view)
        jobs = await self._list(RLHFJOBS, namespace, "", keep_job)
        news = self.store.replace_clusters(clusters, scope) if clusters else set()
        news |= self.store.replace_jobs(jobs, scope) if jobs else set()
        self._listed.add(namespace)
        return news

    async def _list(
        self, resource: Resource, namespace: str | None, labels: str, read: Callable[[Object], T]
    ) -> Listing[T] | None:
        """A kind's objects in a namespace, or in all; None where the kind is not installed."""
        try:
            return await self.around.call(self.kube.list, resource, namespace, labels, read)
        except NotFoundError:
            log.warning("%s is not installed", resource.kind)
            return None

    async def _resync_forever(self) -> None:
        while True:
            wait = self.settings.resync_seconds
            try:
                await self.resync()
            except Exception as error:
                wait = min(wait, 5.0)
                log.warning("resync failed: %s: %s; again in %g s", type(error).__name__, error, wait)
            await asyncio.sleep(wait)

    async def _work(self) -> None:
        """Work once something was listed. If it dies, so do resyncs, which is what tells a probe."""
        await self._synced.wait()
        try:
            await self.queue.run()
        except Exception:
            log.exception("the queue's worker died")
            raise

    def _enqueue(self, key: Key) -> None:
        if not self._listed.isdisjoint((None, key[0])):
            self.queue.add(key)


def registry_of(operator: Operator) -> kopf.OperatorRegistry:
    """Kopf's handlers of an operator."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_via_client(**kwargs)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        _configure(settings, operator.settings)
        operator.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await operator.stop()

    @kopf.on.event(RLHFJOBS.group, RLHFJOBS.version, RLHFJOBS.plural, registry=registry)
    async def job(event: Any, **_: Any) -> None:
        operator.see_job(event["object"], event["type"] == "DELETED")

    @kopf.on.event(RAYCLUSTERS.group, RAYCLUSTERS.version, RAYCLUSTERS.plural, registry=registry)
    async def cluster(event: Any, **_: Any) -> None:
        operator.see_cluster(event["object"], event["type"] == "DELETED")

    return registry


class _NoHistory(kopf.DiffBaseStorage):
    """What kopf keeps to tell changes by: nothing, as no handler asks. It would copy every object several times."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def _configure(settings: kopf.OperatorSettings, ours: Settings) -> None:
    """Have kopf watch, within bounds, and never write."""
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = bool(ours.namespaces)
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 5
    settings.watching.connect_timeout = 5
    settings.watching.server_timeout = 5 * 60
    settings.watching.client_timeout = 5 * 60 + 30
    settings.watching.chunk_size = PAGE
    settings.watching.label_selectors[RAYCLUSTERS.group, RAYCLUSTERS.version, RAYCLUSTERS.plural] = JOB_LABEL
    settings.queueing.worker_limit = 50
    settings.queueing.idle_timeout = 1
    settings.persistence.diffbase_storage = _NoHistory()
    settings.persistence.finalizer = f"{RLHFJOBS.group}/never"


def main() -> int:
    """Run the operator until it is told to stop, and return the exit code."""
    try:
        settings = Settings.read()
        kopf.configure(log_format=kopf.LogFormat.JSON if settings.log_format == "json" else kopf.LogFormat.FULL)
        for library in ("kopf", "httpx"):
            logging.getLogger(library).setLevel(logging.WARNING)
        kube = Kube.connect(connections=settings.api_connections)
        asyncio.run(_run(settings, kube))
    except (SpecError, NoClusterError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _run(settings: Settings, kube: Kube) -> None:
    operator = Operator(settings, kube)
    log.info("%s starts; namespaces: %s", MANAGER, ", ".join(settings.namespaces) or "all")
    identity: Any = MANAGER  # kopf would look for the user's name, which the numeric user of an image does not have
    await kopf.operator(
        identity=identity,
        registry=registry_of(operator),
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        standalone=True,
    )


if __name__ == "__main__":
    sys.exit(main())
