"""Ports of the pods, by the names under which KubeRay and the NetworkPolicy look for them."""

from dataclasses import dataclass

from rlhf_api.runtime_config import PROGRESS_PORT


@dataclass(frozen=True)
class Port:
    """A named port of a container."""

    name: str
    """Its name."""
    number: int
    """Where it listens."""


GCS = Port("gcs-server", 6379)
DASHBOARD = Port("dashboard", 8265)
CLIENT = Port("client", 10001)
METRICS = Port("metrics", 8080)
PROGRESS = Port("progress", PROGRESS_PORT)

HEAD_PORTS = (GCS, DASHBOARD, CLIENT, METRICS, PROGRESS)
"""Each becomes a port of the head's service, too."""
WORKER_PORTS = (METRICS,)
