"""What the operator remembers of the objects that it watches: fed by events and by lists, never going back in time.

A steady job then costs no request at all. Jobs are kept as compact JSON, RayClusters as views, so that thousands fit.
Absence is never believed from here: whoever finds no cluster asks the API server.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rlhf_operator.kube import Listing
from rlhf_operator.observe import ClusterView, JobView, Key, Object, cluster_view, job_view

_DROPPED = ("managedFields", "ownerReferences", "finalizers")


@dataclass(frozen=True)
class _Kept:
    uid: str
    version: int
    data: bytes


class Store:
    """The jobs and RayClusters that were seen last. For one thread."""

    def __init__(self) -> None:
        self._jobs: dict[Key, _Kept] = {}
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

    def see_job(self, obj: Object) -> bool:
        """Remember a job, unless a newer one is known; tells whether it was news."""
        meta = obj["metadata"]
        key, version = (meta["namespace"], meta["name"]), _version(meta["resourceVersion"])
        known = self._jobs.get(key)
        if known and known.version >= version:
            return False
        kept = {**obj, "metadata": {name: value for name, value in meta.items() if name not in _DROPPED}}
        self._jobs[key] = _Kept(meta["uid"], version, json.dumps(kept, separators=(",", ":")).encode())
        return True

    def forget_job(self, key: Key, uid: str) -> None:
        """Forget a job that was deleted, unless another took its name."""
        if key in self._jobs and self._jobs[key].uid == uid:
            del self._jobs[key]

    def see_cluster(self, obj: Object) -> bool:
        """Remember a RayCluster, unless a newer one is known; tells whether it was news."""
        view = cluster_view(obj)
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

    def replace_jobs(self, listing: Listing, namespaces: tuple[str, ...] = ()) -> set[Key]:
        """Take a whole list of jobs, of all namespaces or of some; tells which ones are news, gone ones included."""
        news = {_key(item) for item in listing.items if self.see_job(item)}
        listed, as_of = {_key(item) for item in listing.items}, _version(listing.resource_version)
        gone = [key for key, kept in self._jobs.items() if _missing(key, listed, namespaces, kept.version, as_of)]
        for key in gone:
            del self._jobs[key]
        return news.union(gone)

    def replace_clusters(self, listing: Listing, namespaces: tuple[str, ...] = ()) -> set[Key]:
        """Take a whole list of RayClusters; tells whose jobs have news."""
        news = {_key(item) for item in listing.items if self.see_cluster(item)}
        listed, as_of = {_key(item) for item in listing.items}, _version(listing.resource_version)
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


def _key(obj: Object) -> Key:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _version(text: str) -> int:
    """A resource version as a number: Kubernetes lets those of one kind be compared."""
    return int(text)


def _read(kept: _Kept) -> JobView:
    return job_view(json.loads(kept.data))
