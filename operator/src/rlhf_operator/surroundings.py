"""What a pass asks of the world: the API server in threads, Ray's heads, and what is kept between passes."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from rlhf_api import FieldError, RLHFJob, SpecError

from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.conditions import changed_at, is_true
from rlhf_operator.decision import Leftover, Seen
from rlhf_operator.feasibility import Node, feasibility, node_of
from rlhf_operator.kube import (
    CONFIGMAPS,
    CRDS,
    NETWORKPOLICIES,
    NODES,
    PODS,
    RAYCLUSTERS,
    RLHFJOBS,
    SECRETS,
    ForbiddenError,
    Kube,
    KubeError,
    Object,
)
from rlhf_operator.kuberay import CLUSTER_LABEL
from rlhf_operator.manifests import JOB_LABEL, Owner, Rendered, check_pruned, cluster_name, render
from rlhf_operator.observe import ClusterView, DriverView, JobView, PodView, cluster_view, owner_of, pod_view
from rlhf_operator.policies.edits import must_be_read
from rlhf_operator.policies.head_loss import HEAD_ENDED, HEAD_GONE
from rlhf_operator.ray_jobs import Head, RayJobs, head_of
from rlhf_operator.settings import Settings
from rlhf_operator.shared_answer import SharedAnswer
from rlhf_operator.store import Store, keep_job
from rlhf_operator.terms import Terms, rough_terms, terms_of
from rlhf_operator.work_queue import RetrySoon

P = ParamSpec("P")
T = TypeVar("T")

NODES_SECONDS, CRD_SECONDS, NO_CRD_SECONDS = 30.0, 600.0, 30.0
"""How long a list of nodes, KubeRay's CRD, and its absence, are good for."""
POD_SECONDS = 5.0
"""Age from which a cluster that is not ready has its pods looked at."""


def utc_now() -> datetime:
    """The time."""
    return datetime.now(UTC)


@dataclass
class Memory:
    """What is kept of a job between passes; losing it costs requests, nothing else."""

    spec: tuple[int, Terms, tuple[FieldError, ...]] | None = None
    """The generation that was read last, its terms, and why it cannot be read as a whole."""
    trouble: str | None = None
    """Why the last action was refused, until that is told."""
    pods_at: datetime | None = None
    """When its pods were looked at last."""
    pods_trouble: str = ""
    """Why they could not be then; empty if they could."""
    head: tuple[str, Head] | None = None
    """The cluster's UID, and how to reach its head."""
    told: datetime | None = None
    """When its status was last written."""
    tidied: int = 0
    """Number of the last cluster that is known to have left no object behind."""
    emptied: int = -1
    """Number of the last cluster that is known to have no pod that runs; 0 are those of a deleted job of its name."""
    silent_since: datetime | None = None
    """When Ray's job API was first found silent since it last answered; None where it was not."""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster."""

    items: tuple[Node, ...] | None
    """None where they may not be listed."""


class Surroundings:
    """All that one pass reads."""

    def __init__(
        self, kube: Kube, rays: RayJobs, store: Store, settings: Settings, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._clock = clock
        self.kube, self.rays, self.store, self.settings = kube, rays, store, settings
        self._memories: dict[str, Memory] = {}
        self._threads = ThreadPoolExecutor(settings.api_connections, thread_name_prefix="kube")
        self._nodes = SharedAnswer(self._list_nodes)
        self._crd = SharedAnswer(self._read_crd)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that blocks, in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def memory(self, job: JobView) -> Memory:
        """What is kept of a job."""
        return self._memories.setdefault(job.uid, Memory())

    def forget(self, living: set[str]) -> None:
        """Forget all jobs but those with these UIDs."""
        self._memories = {uid: memory for uid, memory in self._memories.items() if uid in living}

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def look(self, job: JobView) -> Seen:
        """Look at a job: its spec, its clusters, and where they give reason to, its pods, its nodes and its driver.

        What cannot be looked at hides nothing else, so that a job can always be suspended and ended.

        Raises:
            KubeError: when the API server does not tell of the job or its clusters.
            RetrySoon: when what is remembered of the job is older than its clusters.
        """
        memory, blind = self.memory(job), list[str]()
        owned = [cluster for cluster in self.store.clusters_of(job.key) if cluster.owner == job.uid]
        await self._distrust(job, owned)
        cluster = await self._cluster(job)
        ours = cluster if cluster and cluster.owner == job.uid else None
        terms, problems = self._spec(job, memory)
        rendered = None
        if not problems and not _finished(job) and must_be_read(job.status, job.generation):
            try:
                rendered = await _unless_blind(self.render(job, (job.status.cluster or 0) + 1), blind)
                problems = () if rendered else None
            except SpecError as error:
                problems = tuple(error.errors)
        rests = _finished(job) or terms.suspend
        waits = not (rests or problems or (ours and (ours.ready_by_sums or ours.suspended)))
        nodes = await _unless_blind(self.nodes(), []) if waits else None
        pods = await self._pods(job, ours, memory) if ours else None
        blind += [memory.pods_trouble] if ours and memory.pods_trouble else []
        driver = await self._driver(job, ours, memory) if ours else None
        return Seen(
            job=job,
            now=self._clock(),
            terms=terms,
            problems=problems,
            rendered=rendered,
            cluster=cluster,
            others=tuple(other for other in owned if other.name != job.status.ray_cluster),
            leftovers=await _unless_blind(self._leftovers(job, owned, memory), blind),
            lingering=() if rests else await _unless_blind(self._lingering(job, terms, owned, memory), blind),
            pods=pods,
            driver=driver,
            silent_since=memory.silent_since,
            feasibility=feasibility(terms.pools, nodes.items) if nodes else None,
            trouble=memory.trouble,
            blind="; ".join(blind),
            told=memory.told,
        )

    async def render(self, job: JobView, cluster: int) -> Rendered:
        """The objects of a cluster of a job.

        Raises:
            SpecError: with every problem of the job, and what the installed KubeRay would drop of it.
            KubeError: when the API server does not tell what KubeRay is installed.
        """
        return await self.call(self._render, job, cluster, await self._crd.get())

    async def head(self, cluster: ClusterView, memory: Memory) -> Head:
        """How to reach a cluster's head; its token is read once.

        Raises:
            KubeError: when the API server does not tell.
        """
        if memory.head and memory.head[0] == cluster.uid:
            return memory.head[1]
        secret = await self.call(self.kube.get, SECRETS, cluster.namespace, cluster.name)
        head = head_of(cluster, secret)
        if secret:
            memory.head = cluster.uid, head
        return head

    async def nodes(self) -> Nodes:
        """All nodes, listed at most every `NODES_SECONDS` for all jobs together.

        Raises:
            KubeError: when the API server did not tell, and never has.
        """
        return await self._nodes.get()

    async def _list_nodes(self) -> tuple[Nodes, float]:
        if self.settings.namespaces:
            return Nodes(None), NODES_SECONDS
        try:
            listing = await self.call(self.kube.list, NODES, None, "", node_of)
        except ForbiddenError:
            return Nodes(None), NODES_SECONDS
        except KubeError:
            if self._nodes.last is None:
                raise
            return self._nodes.last, NODES_SECONDS
        return Nodes(tuple(listing.items)), NODES_SECONDS

    async def _read_crd(self) -> tuple[Object | None, float]:
        """KubeRay's CRD as it is installed; None where it is not, or may not be read."""
        crd = None
        if not self.settings.namespaces:
            try:
                crd = await self.call(self.kube.get, CRDS, None, f"{RAYCLUSTERS.plural}.{RAYCLUSTERS.group}")
            except ForbiddenError:
                crd = None
        return crd, CRD_SECONDS if crd else NO_CRD_SECONDS

    def _spec(self, job: JobView, memory: Memory) -> tuple[Terms, tuple[FieldError, ...] | None]:
        """The terms of a job, and why its spec cannot be read as a whole; None if it can."""
        if memory.spec is None or memory.spec[0] != job.generation:
            try:
                memory.spec = job.generation, terms_of(RLHFJob.from_cluster(job.manifest)), ()
            except SpecError as error:
                memory.spec = job.generation, rough_terms(job.manifest["spec"]), tuple(error.errors)
        _, terms, problems = memory.spec
        return terms, problems or None

    async def _distrust(self, job: JobView, owned: list[ClusterView]) -> None:
        """Look anew at a job that has a cluster of a number it has not reached: what is remembered of it is old."""
        if all(cluster.number <= (job.status.cluster or 0) for cluster in owned):
            return
        fresh = await self.call(self.kube.get, RLHFJOBS, job.namespace, job.name)
        if fresh and self.store.see_job(keep_job(fresh)):
            raise RetrySoon

    async def _cluster(self, job: JobView) -> ClusterView | None:
        """The RayCluster that the status names. Where none is remembered, the API server has the last word."""
        name = job.status.ray_cluster
        if name is None:
            return None
        key = (job.namespace, name)
        known = self.store.cluster(key)
        if known is None:
            fresh = await self.call(self.kube.get, RAYCLUSTERS, *key)
            if fresh:
                self.store.see_cluster(cluster_view(fresh))
                known = self.store.cluster(key)
        return known

    async def _pods(self, job: JobView, cluster: ClusterView, memory: Memory) -> tuple[PodView, ...] | None:
        """The pods of a cluster, where its sums do not tell how it fares; None where they were not looked at."""
        if not self._wants_pods(job, cluster, memory):
            return None
        memory.pods_at = self._clock()
        try:
            labels = f"{CLUSTER_LABEL}={cluster.name}"
            listing = await self.call(self.kube.list, PODS, cluster.namespace, labels, pod_view)
        except KubeError as error:
            memory.pods_trouble = f"its pods cannot be looked at: {error}"
            return None
        memory.pods_trouble = ""
        return tuple(listing.items)

    def _wants_pods(self, job: JobView, cluster: ClusterView, memory: Memory) -> bool:
        """Whether pods say more than their sum: which group has them, or, less often the longer it takes, what ails."""
        status = job.status
        if cluster.suspended or cluster.deleting:
            return False
        if cluster.ready_by_sums:
            settled = is_true(status, "ClusterReady") and is_true(status, "Training")
            told = sum(pool.ready for pool in status.pools)
            return cluster.scales and not (settled and told == cluster.ready_workers)
        head = cluster.conditions.get("HeadPodReady")
        if head and head.reason in HEAD_ENDED and not cluster.provisioned:
            return True  # in a moment it is deleted, and with it the reason
        now = self._clock()
        age = (now - max(cluster.created, changed_at(status, "ClusterReady") or cluster.created)).total_seconds()
        rested = (now - memory.pods_at).total_seconds() if memory.pods_at else age
        return age >= POD_SECONDS and rested >= min(max(age / 4, POD_SECONDS / 2), 30)

    async def _leftovers(self, job: JobView, owned: list[ClusterView], memory: Memory) -> tuple[Leftover, ...]:
        """What is left of the last cluster, once its RayCluster is gone."""
        number = job.status.cluster or 0
        if not _without_cluster(job, owned) or number == memory.tidied:
            return ()
        name, found = cluster_name(job.name, number), list[Leftover]()
        for resource in (NETWORKPOLICIES, CONFIGMAPS):
            left = await self.call(self.kube.get, resource, job.namespace, name)
            if left and owner_of(left) == job.uid:
                found.append(Leftover(resource.kind, name, left["metadata"]["uid"]))
        if not found:
            memory.tidied = number
        return tuple(found)

    async def _lingering(
        self, job: JobView, terms: Terms, owned: list[ClusterView], memory: Memory
    ) -> tuple[PodView, ...]:
        """The job's pods that may still run, once its RayCluster is gone: they have their grace, it had none.

        Before its first cluster those of a deleted job of its name, if they could write to the same checkpoints.
        """
        number = job.status.cluster or 0
        if not _without_cluster(job, owned) or number == memory.emptied or not (number or terms.has_checkpoints):
            return ()
        listing = await self.call(self.kube.list, PODS, job.namespace, f"{JOB_LABEL}={job.name}", pod_view)
        found = tuple(pod for pod in listing.items if pod.may_run(self._clock()))
        if not found:
            memory.emptied = number
        return found

    async def _driver(self, job: JobView, cluster: ClusterView, memory: Memory) -> DriverView | None:
        """Ray's word about the current try, where there is one, and a head that could tell."""
        head = cluster.conditions.get("HeadPodReady")
        gone = head is not None and head.reason == HEAD_GONE
        if job.status.submission_id is None or cluster.suspended or cluster.deleting or gone:
            return None
        try:
            driver = await self.rays.look(await self.head(cluster, memory), job.status.submission_id)
        except KubeError as error:
            driver = DriverView("unreachable", f"the Secret of its token cannot be read: {error}")
        memory.silent_since = (memory.silent_since or self._clock()) if driver.state == "unreachable" else None
        return driver

    def _render(self, job: JobView, cluster: int, crd: Object | None) -> Rendered:
        plan = plan_cluster(RLHFJob.from_cluster(job.manifest), self.settings.default_image)
        owner = Owner(job.uid, job.name, job.namespace)
        ours = self.kube.namespace if self.kube.in_pod else None
        rendered = render(plan, owner, cluster, ours, self.settings.api_server_cidrs)
        if crd and (dropped := check_pruned(rendered.objects, crd)):
            raise SpecError(dropped)
        return rendered


def _finished(job: JobView) -> bool:
    return job.status.phase in ("Succeeded", "Failed")


def _without_cluster(job: JobView, owned: list[ClusterView]) -> bool:
    """Whether the job has no RayCluster, nor is to have one that was named."""
    return not (job.deleting or job.status.ray_cluster or owned)


async def _unless_blind(look: Awaitable[T], blind: list[str]) -> T | None:
    """What a look finds; None where the API server does not tell, whose words are then added to `blind`."""
    try:
        return await look
    except KubeError as error:
        blind.append(str(error))
        return None
