"""What a pass asks of the world: the API server in threads, Ray's heads, and what is kept between passes."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ParamSpec, TypeVar

from rlhf_api import FieldError, RLHFJob, SpecError

from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.decision import Seen
from rlhf_operator.feasibility import Node, feasibility, node_of
from rlhf_operator.kube import (
    CRDS,
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
from rlhf_operator.manifests import Owner, Rendered, check_pruned, cluster_name, render
from rlhf_operator.observe import ClusterView, DriverView, JobView, PodView, pod_view
from rlhf_operator.policies.edits import must_be_read
from rlhf_operator.policies.head_loss import HEAD_GONE
from rlhf_operator.ray_jobs import Head, RayJobs, head_of
from rlhf_operator.settings import Settings
from rlhf_operator.store import Store
from rlhf_operator.terms import Terms, terms_of
from rlhf_operator.work_queue import RetrySoon

P = ParamSpec("P")
T = TypeVar("T")

NODES_SECONDS, CRD_SECONDS = 30.0, 600.0
"""How long a list of nodes, and KubeRay's CRD, are good for."""
POD_SECONDS = 3.0
"""Age from which a cluster that is not ready has its pods looked at."""


def utc_now() -> datetime:
    """The time."""
    return datetime.now(UTC)


@dataclass
class Memory:
    """What is kept of a job between passes; losing it costs requests, nothing else."""

    generation: int = 0
    terms: Terms | None = None
    trouble: str | None = None
    """Why the last action was refused."""
    pods_at: datetime | None = None
    """When its pods were looked at last."""
    rendered: tuple[int, Rendered] | None = None
    """The objects of the cluster to come, with the generation they were rendered from."""
    head: tuple[str, Head] | None = None
    """The cluster's UID, and how to reach its head."""


class Surroundings:
    """All that one pass reads."""

    def __init__(
        self, kube: Kube, rays: RayJobs, store: Store, settings: Settings, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self._clock = clock
        self.kube, self.rays, self.store, self.settings = kube, rays, store, settings
        self._memories: dict[str, Memory] = {}
        self._threads = ThreadPoolExecutor(settings.api_connections, thread_name_prefix="kube")
        self._nodes: asyncio.Task[tuple[Node, ...] | None] | None = None
        self._nodes_until = 0.0
        self._crd: asyncio.Task[Object | None] | None = None
        self._crd_until = 0.0

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

        Raises:
            KubeError: when the API server does not tell.
            RetrySoon: when what is remembered of the job is older than its clusters.
        """
        memory = self.memory(job)
        trouble, memory.trouble = memory.trouble, None
        terms, problems = await self._spec(job, memory)
        owned = [cluster for cluster in self.store.clusters_of(job.key) if cluster.owner == job.uid]
        await self._distrust(job, owned)
        cluster = await self._cluster(job)
        ours = cluster if cluster and cluster.owner == job.uid else None
        waits = terms is not None and not (ours and (ours.ready or ours.suspended))
        return Seen(
            job=job,
            now=self._clock(),
            terms=terms,
            problems=problems,
            cluster=cluster,
            others=tuple(other for other in owned if other.name != job.status.ray_cluster),
            pods=await self._pods(ours, memory) if ours else None,
            driver=await self._driver(job, ours, memory) if ours else None,
            feasibility=feasibility(terms.pools, await self.nodes()) if terms and waits else None,
            trouble=trouble,
        )

    async def render(self, job: JobView, cluster: int) -> Rendered:
        """The objects of a cluster of a job.

        Raises:
            SpecError: with every problem of the job, and what the installed KubeRay would drop of it.
        """
        memory = self.memory(job)
        kept, memory.rendered = memory.rendered, None
        if kept and kept[0] == job.generation and kept[1].name == cluster_name(job.name, cluster):
            return kept[1]
        return await self.call(self._render, job, cluster, await self._kuberay())

    async def head(self, cluster: ClusterView, memory: Memory) -> Head:
        """How to reach a cluster's head; its token is read once.

        Raises:
            KubeError: when the API server does not tell.
        """
        if memory.head is None or memory.head[0] != cluster.uid:
            secret = await self.call(self.kube.get, SECRETS, cluster.namespace, cluster.name)
            memory.head = cluster.uid, head_of(cluster, secret)
        return memory.head[1]

    async def nodes(self) -> tuple[Node, ...] | None:
        """All nodes, listed at most every `NODES_SECONDS` for all jobs together; None where they may not be."""
        if self._nodes is None or time.monotonic() > self._nodes_until:
            self._nodes_until = time.monotonic() + NODES_SECONDS
            self._nodes = asyncio.create_task(self._list_nodes())
        return await asyncio.shield(self._nodes)

    async def _list_nodes(self) -> tuple[Node, ...] | None:
        if self.settings.namespaces:
            return None
        try:
            listing = await self.call(self.kube.list, NODES)
        except KubeError:
            return None
        return tuple(map(node_of, listing.items))

    async def _kuberay(self) -> Object | None:
        """KubeRay's CRD as it is installed; None where it is not, or may not be read."""
        if self._crd is None or time.monotonic() > self._crd_until:
            self._crd_until = time.monotonic() + CRD_SECONDS
            self._crd = asyncio.create_task(self._read_crd())
        return await asyncio.shield(self._crd)

    async def _read_crd(self) -> Object | None:
        if self.settings.namespaces:
            return None
        try:
            return await self.call(self.kube.get, CRDS, None, f"{RAYCLUSTERS.plural}.{RAYCLUSTERS.group}")
        except ForbiddenError:
            return None

    async def _spec(self, job: JobView, memory: Memory) -> tuple[Terms | None, tuple[FieldError, ...] | None]:
        """The terms of a job, and the problems of its spec if it has to be read anew."""
        problems: list[FieldError] = []
        if memory.generation != job.generation:
            try:
                memory.terms = terms_of(RLHFJob.from_cluster(job.manifest))
            except SpecError as error:
                memory.terms, problems = None, error.errors
            memory.generation = job.generation
        finished = job.status.phase in ("Succeeded", "Failed")
        if finished or not must_be_read(job.status, job.generation):
            return memory.terms, None
        try:
            memory.rendered = job.generation, await self.render(job, (job.status.cluster or 0) + 1)
        except SpecError as error:
            problems = error.errors
        return memory.terms, tuple(problems)

    async def _distrust(self, job: JobView, owned: list[ClusterView]) -> None:
        """Look anew at a job that has a cluster of a number it has not reached: what is remembered of it is old."""
        if all(cluster.number <= (job.status.cluster or 0) for cluster in owned):
            return
        fresh = await self.call(self.kube.get, RLHFJOBS, job.namespace, job.name)
        if fresh and self.store.see_job(fresh):
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
                self.store.see_cluster(fresh)
                known = self.store.cluster(key)
        return known

    async def _pods(self, cluster: ClusterView, memory: Memory) -> tuple[PodView, ...] | None:
        """The pods of a cluster that takes long to get ready, less often the longer it takes."""
        if cluster.ready or cluster.suspended or cluster.deleting:
            return None
        now = self._clock()
        age = (now - cluster.created).total_seconds()
        rested = (now - memory.pods_at).total_seconds() if memory.pods_at else age
        if age < POD_SECONDS or rested < min(max(age / 4, POD_SECONDS / 2), 30):
            return None
        memory.pods_at = now
        selector = f"{CLUSTER_LABEL}={cluster.name}"
        listing = await self.call(self.kube.list, PODS, cluster.namespace, labels=selector)
        return tuple(map(pod_view, listing.items))

    async def _driver(self, job: JobView, cluster: ClusterView, memory: Memory) -> DriverView | None:
        """Ray's word about the current try, where there is one, and a head that could tell."""
        head = cluster.conditions.get("HeadPodReady")
        gone = head is not None and head.reason == HEAD_GONE
        if job.status.submission_id is None or cluster.suspended or cluster.deleting or gone:
            return None
        return await self.rays.look(await self.head(cluster, memory), job.status.submission_id)

    def _render(self, job: JobView, cluster: int, crd: Object | None) -> Rendered:
        plan = plan_cluster(RLHFJob.from_cluster(job.manifest), self.settings.default_image)
        owner = Owner(job.uid, job.name, job.namespace)
        ours = self.kube.namespace if self.kube.in_pod else None
        rendered = render(plan, owner, cluster, ours, self.settings.api_server_cidrs)
        if crd and (dropped := check_pruned(rendered.objects, crd)):
            raise SpecError(dropped)
        return rendered
