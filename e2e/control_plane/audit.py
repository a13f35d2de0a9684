"""The API server's audit log: who asked for what."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})

# The cluster's own programs are left out: their leases and status updates would bury what a test looks for.
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {
            "level": "None",
            "users": ["system:apiserver", "system:kube-controller-manager", "system:kube-scheduler", "kwok"],
        },
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata"},
    ],
}


@dataclass(frozen=True)
class Request:
    """One request that the API server has answered.

    Attributes:
        user: Who asked; for an impersonated user, that one.
        verb: get, list, watch, create, update, patch, delete or deletecollection.
        resource: Plural name of what was asked for, with its subresource: `rlhfjobs/status`.
        namespace: Namespace, empty for what has none.
        name: Name of the object, empty for a list.
        code: HTTP status of the answer.
        received: When it came in, RFC 3339 with microseconds in UTC: text order is time order.
        answered: When it was answered, likewise.
    """

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    received: str
    answered: str

    @property
    def writes(self) -> bool:
        """Whether the request would change an object; what is passed on to a pod changes none."""
        return self.verb in WRITES and not self.resource.endswith("/proxy")


def read(log: Path, offset: int = 0) -> Iterator[Request]:
    """The requests of an audit log, in the order in which they were answered.

    Args:
        log: The API server's audit log.
        offset: Bytes of the log to pass over, for example its size at some earlier moment.
    """
    with log.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # still being written
            event = json.loads(line)
            target = event.get("objectRef", {})
            resource = target.get("resource", "")
            if target.get("subresource"):
                resource += "/" + target["subresource"]
            yield Request(
                user=event.get("impersonatedUser", event["user"]).get("username", ""),
                verb=event["verb"],
                resource=resource,
                namespace=target.get("namespace", ""),
                name=target.get("name", ""),
                code=event.get("responseStatus", {}).get("code", 0),
                received=event["requestReceivedTimestamp"],
                answered=event["stageTimestamp"],
            )
