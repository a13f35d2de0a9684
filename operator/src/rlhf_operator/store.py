"""What the operator remembers of the objects that it watches: fed by events and by lists, never going back in time.

A steady job then costs no request at all. Jobs are kept as compact JSON, RayClusters as views, so that thousands fit.
Absence is never believed from here: whoever finds no cluster asks the API server.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rlhf_operator.kube import Listing
from rlhf_operator.observe import ClusterView, JobView, Key, Object, job_view

_DROPPED = ("managedFields", "ownerReferences", "finalizers")


@dataclass(frozen=True)
class KeptJob:
    """A job as it is remembered."""

    key: Key
    """Namespace and name."""
    uid: str
    version: int
    """Its resource version."""
    data: bytes
    """The object as JSON, without what is not looked at."""


def keep_job(obj: Object) -> KeptJob:
    """What is remembered of a job."""
    meta = obj["metadata"]
    kept = {**obj, "metadata": {name: value for name, value in meta.items() if name not in _DROPPED}}
    data = json.dumps(kept, separators=(",", ":")).encode()
    return KeptJob((meta["namespace"], meta["name"]), meta["uid"], _version(meta["resourceVersion"]), data)


class Store:
    """The jobs and RayClusters that were seen last. For one thread."""

    def __init__(self) -> None:
        self._jobs: dict[Key, KeptJob] = {}
        self._clusters: dict[Key, ClusterView] = {}
        self._of_job: dict[Key, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def jobs(self) -> Iterator[JobView]:
        """All jobs."""
        return (_read(kept) for kept in list(self._jobs.values()))

    @property
    def keys(self) -> list[Key]:
        """Namespaces and names of all jobs."""
        return list(self._jobs)

    def job(self, key: Key) -> JobView | None:
        """A job; None if it is not known."""
        kept = self._jobs.get(key)
        return _read(kept) if kept else None

    def cluster(self, key: Key) -> ClusterView | None:
        """A RayCluster; None if it is not known, which does not mean that it is not there."""
        return self._clusters.get(key)

    def clusters_of(self, job: Key) -> list[ClusterView]:
        """RayClusters with the label of a job of that name, in the order of their numbers."""
        found = [self._clusters[key] for key in self._of_job.get(job, ())]
        return sorted(found, key=lambda cluster: (cluster.number, cluster.name))

    def see_job(self, job: KeptJob) -> bool:
        """Remember a job, unless a newer one is known; tells whether it was news."""
        known = self._jobs.get(job.key)
        if known and known.version >= job.version:
            return False
        self._jobs[job.key] = job
        return True

    def forget_job(self, key: Key, uid: str) -> None:
        """Forget a job that was deleted, unless another took its name."""
        if key in self._jobs and self._jobs[key].uid == uid:
            del self._jobs[key]

    def see_cluster(self, view: ClusterView) -> bool:
        """Remember a RayCluster, unless a newer one is known; tells whether it was news."""
        known = self._clusters.get(view.key)
        if known and _version(known.resource_version) >= _version(view.resource_version):
            return False
        if known:
            self._unlink(known)
        self._clusters[view.key] = view
        if view.job:
            self._of_job.setdefault((view.namespace, view.job), set()).add(view.key)
        return True

    def forget_cluster(self, key: Key, uid: str) -> None:
        """Forget a RayCluster that was deleted, unless another took its name."""
        known = self._clusters.get(key)
        if known and known.uid == uid:
            self._unlink(known)
            del self._clusters[key]

    def mark_deleting(self, cluster: ClusterView) -> None:
        """Remember that a RayCluster was deleted by us, until the watch tells that it is gone."""
        known = self._clusters.get(cluster.key)
        if known and known.uid == cluster.uid:
            self._clusters[cluster.key] = replace(known, deleting=True)

    def replace_jobs(self, listing: Listing[KeptJob], namespaces: tuple[str, ...] = ()) -> set[Key]:
        """Take a whole list of jobs, of all namespaces or of some; tells which ones are news, gone ones included."""
        news = {job.key for job in listing.items if self.see_job(job)}
        listed, as_of = {job.key for job in listing.items}, _version(listing.resource_version)
        gone = [key for key, kept in self._jobs.items() if _missing(key, listed, namespaces, kept.version, as_of)]
        for key in gone:
            del self._jobs[key]
        return news.union(gone)

    def replace_clusters(self, listing: Listing[ClusterView], namespaces: tuple[str, ...] = ()) -> set[Key]:
        """Take a whole list of RayClusters; tells whose jobs have news."""
        news = {view.key for view in listing.items if self.see_cluster(view)}
        listed, as_of = {view.key for view in listing.items}, _version(listing.resource_version)
        gone = [
            view
            for key, view in self._clusters.items()
            if _missing(key, listed, namespaces, _version(view.resource_version), as_of)
        ]
        views = [*gone, *(self._clusters[key] for key in news)]
        for view in gone:
            self.forget_cluster(view.key, view.uid)
        return {(view.namespace, view.job) for view in views if view.job}

    def _unlink(self, view: ClusterView) -> None:
        owner = (view.namespace, view.job or "")
        siblings = self._of_job.get(owner)
        if siblings:
            siblings.discard(view.key)
            if not siblings:
                del self._of_job[owner]


def _missing(key: Key, listed: set[Key], namespaces: Iterable[str], version: int, as_of: int) -> bool:
    """Whether an object is gone: the list covers its namespace, does not have it, and is not older than it."""
    namespaces = tuple(namespaces)
    return key not in listed and version <= as_of and (not namespaces or key[0] in namespaces)


def _version(text: str) -> int:
    """A resource version as a number: Kubernetes lets those of one kind be compared."""
    return int(text)


def _read(kept: KeptJob) -> JobView:
    return job_view(json.loads(kept.data))
