"""What every rendered object shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_api.job import GROUP, VERSION

from rlhf_operator.manifests.names import cluster_name, labels_of

Manifest = dict[str, Any]
"""A rendered Kubernetes object, or a part of one."""


@dataclass(frozen=True)
class Owner:
    """The RLHFJob that the rendered objects belong to."""

    uid: str
    """Its UID."""
    name: str
    """Its name."""
    namespace: str
    """Its namespace, and that of its objects."""


@dataclass(frozen=True)
class Place:
    """Whose cluster is rendered, and where."""

    job: str
    """The job."""
    cluster: int
    """Number of the cluster."""
    namespace: str | None
    """Namespace of the objects; none leaves it to whoever applies them."""
    owner: Owner | None
    """What the objects go with."""

    @property
    def name(self) -> str:
        """Name of each object."""
        return cluster_name(self.job, self.cluster)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of each object."""
        return labels_of(self.job, self.cluster)


def metadata(
    place: Place, labels: Mapping[str, str] | None = None, annotations: Mapping[str, str] | None = None
) -> Manifest:
    """Metadata of an object of a job's cluster, with labels and annotations of its own."""
    made: Manifest = {"name": place.name}
    if place.namespace:
        made["namespace"] = place.namespace
    made["labels"] = {**(labels or {}), **place.labels}
    if annotations:
        made["annotations"] = dict(annotations)
    if owner := place.owner:
        reference = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RLHFJob", "name": owner.name, "uid": owner.uid}
        made["ownerReferences"] = [reference | {"controller": True, "blockOwnerDeletion": False}]
    return made
