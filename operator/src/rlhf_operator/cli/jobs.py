"""RLHFJobs on a cluster, as commands need them. Imports the client, so commands import this when they run."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Self

from rlhf_api import FieldError, RLHFJob

from rlhf_operator.cli.problems import RefusalError
from rlhf_operator.kube import (
    EVENTS,
    PODS,
    RAYCLUSTERS,
    RLHFJOBS,
    SECRETS,
    ConflictError,
    ForbiddenError,
    InvalidError,
    Kube,
    KubeError,
    NoClusterError,
    NotFoundError,
    Object,
    UnavailableError,
)
from rlhf_operator.manifests.names import JOB_LABEL
from rlhf_operator.observe import cluster_view
from rlhf_operator.ray_jobs import Head, RayJobs, UnreachableError, head_of

MANAGER = "rlhf"
"""Field manager of what a person asks for."""
Verb = Literal["created", "configured", "unchanged"]

__all__ = ["Jobs", "KubeError", "NoClusterError", "UnreachableError", "refusal_of", "time_of_event"]


@dataclass(frozen=True)
class Jobs:
    """The jobs of one namespace."""

    kube: Kube
    namespace: str

    @classmethod
    def connect(cls, namespace: str | None, context: str | None, kubeconfig: str | None) -> Self:
        """The jobs of a namespace, by default the context's.

        Raises:
            NoClusterError: without credentials.
        """
        kube = Kube.connect(kubeconfig, context, connections=2)
        return cls(kube, namespace or kube.namespace)

    def get(self, name: str) -> Object | None:
        """A job; None where there is none.

        Raises:
            KubeError: when the API server refuses.
        """
        return self.kube.get(RLHFJOBS, self.namespace, name)

    def look_again(self, name: str, before: Object | None) -> Object | None:
        """A job as it is now; as it was before while the API server is away.

        Raises:
            KubeError: when the API server refuses.
        """
        try:
            return self.get(name)
        except UnavailableError:
            return before

    def find(self, name: str) -> Object:
        """A job that has to be there.

        Raises:
            RefusalError: naming those that are.
            KubeError: when the API server refuses.
        """
        if (job := self.get(name)) is not None:
            return job
        names = [other["metadata"]["name"] for other in self.matching()]  # says so where the kind is not installed
        known = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        expected = f"one of {known}" if names else "a job, of which there are none"
        fix = "correct the name, or give its namespace with -n"
        raise RefusalError(FieldError("NAME", f"`{name}` in namespace {self.namespace}", expected, fix))

    def matching(self, everywhere: bool = False, labels: str = "") -> list[Object]:
        """The jobs that a label selector chooses, by namespace and name.

        Raises:
            KubeError: when the API server refuses.
        """
        items = self.kube.list(RLHFJOBS, None if everywhere else self.namespace, labels, dict).items
        return sorted(items, key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"]))

    def apply(self, job: RLHFJob, dry_run: bool, force: bool) -> Verb:
        """Apply a manifest as it was written, server-side.

        Args:
            job: the manifest.
            dry_run: let the API server look at it, and change nothing.
            force: take over fields that another set.

        Raises:
            KubeError: when the API server refuses.
        """
        manifest = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
        manifest["metadata"]["namespace"] = self.namespace
        query = {"fieldManager": MANAGER, "force": str(force).lower()} | ({"dryRun": "All"} if dry_run else {})
        before = self.get(job.metadata.name)
        after = self.kube.apply(manifest, RLHFJOBS, **query)
        if before is None:
            return "created"
        return "unchanged" if _asked_for(before) == _asked_for(after) else "configured"

    def suspend(self, name: str, suspend: bool) -> bool:
        """Set `spec.suspend`.

        Returns:
            Whether that is a change.

        Raises:
            RefusalError: when there is no such job.
            KubeError: when the API server refuses.
        """
        if bool(self.find(name)["spec"].get("suspend")) == suspend:
            return False
        self.kube.patch(RLHFJOBS, self.namespace, name, {"spec": {"suspend": suspend}}, manager=MANAGER)
        return True

    def delete(self, name: str) -> None:
        """Delete a job that has to be there; what it owns goes after it.

        Raises:
            RefusalError: when there is no such job.
            KubeError: when the API server refuses.
        """
        self.kube.delete(RLHFJOBS, self.namespace, name, self.find(name)["metadata"]["uid"])

    def remains(self, name: str) -> Iterator[str]:
        """What is left of a deleted job, such as `pod/math-1-head`.

        Raises:
            KubeError: when the API server refuses.
        """
        if self.get(name) is not None:
            yield f"rlhfjob/{name}"
        for resource in (RAYCLUSTERS, PODS):
            with suppress(NotFoundError):  # a cluster without KubeRay has none
                for left in self.kube.list(resource, self.namespace, f"{JOB_LABEL}={name}", dict).items:
                    yield f"{resource.kind.lower()}/{left['metadata']['name']}"

    def events(self, name: str) -> list[Object]:
        """The events of a job, its RayClusters and their pods, the oldest first.

        Raises:
            KubeError: when the API server refuses.
        """
        cluster = rf"{re.escape(name)}-\d+"
        names = {"RLHFJob": re.escape(name), "RayCluster": cluster, "Pod": rf"{cluster}-(?!\d+-).*"}

        def belongs(event: Object) -> bool:
            about = event["involvedObject"]
            return bool(re.fullmatch(names.get(about.get("kind", ""), "(?!)"), about.get("name", "")))

        return sorted(filter(belongs, self.kube.list(EVENTS, self.namespace, "", dict).items), key=time_of_event)

    async def driver_log(
        self, ray_cluster: str, submission_id: str, lines: int | None = None, follow: bool = False
    ) -> AsyncIterator[bytes]:
        """What a driver has written, a piece at a time; as `RayJobs.log`.

        Raises:
            UnreachableError: where the API server, Ray or the try is away or gone, and when the connection is lost.
            KubeError: when the API server refuses, such as to show the cluster's token.
        """
        head = await asyncio.to_thread(self.head, ray_cluster)
        rays = self.rays()
        try:
            async for chunk in rays.log(head, submission_id, lines, follow):
                yield chunk
        finally:
            await rays.close()

    def rays(self) -> RayJobs:
        """Ray's job APIs, as they are reached from here."""
        return RayJobs(self.kube.access())

    def head(self, ray_cluster: str) -> Head:
        """The head of a RayCluster.

        Raises:
            UnreachableError: where the API server is away or the RayCluster gone.
            KubeError: when the API server refuses, such as to show the cluster's token.
        """
        try:
            cluster = self.kube.get(RAYCLUSTERS, self.namespace, ray_cluster)
            secret = self.kube.get(SECRETS, self.namespace, ray_cluster) if cluster else None
        except UnavailableError:
            raise UnreachableError("the API server does not answer") from None
        if cluster is None:
            raise UnreachableError("its RayCluster is gone")
        return head_of(cluster_view(cluster), secret)


def _asked_for(job: Object) -> tuple[Object, ...]:
    """What people ask for in a job; the operator's writes and the API server's own notes are no part of it."""
    metadata = job["metadata"]
    return job["spec"], metadata.get("labels") or {}, metadata.get("annotations") or {}


def time_of_event(event: Mapping[str, object]) -> str:
    """When an event was last seen, RFC 3339."""
    series = event.get("series")
    last = series.get("lastObservedTime") if isinstance(series, dict) else None
    metadata = event["metadata"]
    created = metadata.get("creationTimestamp") if isinstance(metadata, dict) else None
    return str(last or event.get("lastTimestamp") or event.get("eventTime") or created or "")


def refusal_of(error: KubeError | NoClusterError) -> RefusalError:
    """What is said of an answer that is none, and whether the user can mend it (2) or not (1)."""
    got = " ".join(str(error).split())
    if isinstance(error, NoClusterError):
        fix = "set KUBECONFIG, or give --kubeconfig and --context"
        return RefusalError(FieldError("cluster", got, "a kubeconfig that can be used", fix))
    said = " ".join(error.message.split())
    match error:
        case UnavailableError():
            fix = "check that the cluster runs, and --context"
            return RefusalError(FieldError("cluster", said, "an answer", fix), exit_code=1)
        case NotFoundError() if said.startswith("namespaces "):
            return RefusalError(FieldError("namespace", said, "one that exists", "create it, or correct -n"))
        case NotFoundError():
            fix = "install the operator: `helm install rlhf-operator charts/rlhf-operator`"
            return RefusalError(FieldError("cluster", f"no kind RLHFJob ({said})", "one that knows RLHFJobs", fix))
        case ForbiddenError():
            return RefusalError(FieldError("cluster", said, "the right to do this", "ask an administrator for it"))
        case ConflictError():
            fix = "leave the field out, or take it over with --force-conflicts"
            return RefusalError(FieldError("cluster", said, "fields that nobody else set", fix))
        case InvalidError():
            return RefusalError(FieldError("cluster", said, "a job that the API server takes", "correct the manifest"))
    if error.status == 401:
        return RefusalError(FieldError("cluster", "credentials that it does not know", "valid ones", "log in again"))
    return RefusalError(FieldError("cluster", got, "another answer", "look at the API server's log"), exit_code=1)
