"""The operator's numbers for Prometheus, and its health by the age of the last resync."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prometheus_client
from rlhf_api.status import RLHFJobStatus

from rlhf_operator.observe import parse_time

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
LONG_SECONDS = (5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
PHASES = ("Pending", "Provisioning", "Training", "Suspended", "Restarting", "Succeeded", "Failed")
ANY_ADDRESS = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
"""Where probes and Prometheus are waited for: on a cluster of IPv6 alone they come by that."""
FIRST_RESYNC_SECONDS = 120.0
"""How long the first resync may take before the operator counts as ill."""


class Metrics:
    """All numbers, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=self.registry)
        self._reconciles = prometheus_client.Counter(
            "rlhf_operator_reconciles", "Passes over jobs.", ["result"], registry=self.registry
        )
        self._duration = prometheus_client.Histogram(
            "rlhf_operator_reconcile_seconds", "Duration of a pass.", buckets=SECONDS, registry=self.registry
        )
        self._waited = prometheus_client.Histogram(
            "rlhf_operator_queue_wait_seconds",
            "How long a job waited beyond its time.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._jobs = prometheus_client.Gauge("rlhf_operator_jobs", "Jobs.", ["phase"], registry=self.registry)
        self._tries = prometheus_client.Counter("rlhf_operator_tries", "Drivers submitted.", registry=self.registry)
        self._failures = prometheus_client.Counter(
            "rlhf_operator_failures", "Failures of jobs.", ["kind", "reason"], registry=self.registry
        )
        self._ready = prometheus_client.Histogram(
            "rlhf_operator_cluster_ready_seconds",
            "From a job's start to its first ready cluster.",
            buckets=LONG_SECONDS,
            registry=self.registry,
        )
        self._resync = prometheus_client.Gauge(
            "rlhf_operator_last_resync_timestamp_seconds", "When all jobs were last listed.", registry=self.registry
        )

    def started(self, waited: float) -> None:
        """A pass begins."""
        self._waited.observe(max(waited, 0.0))

    def finished(self, result: str, seconds: float) -> None:
        """A pass ended."""
        self._reconciles.labels(result).inc()
        self._duration.observe(seconds)

    def resynced(self, phases: Iterable[str | None]) -> None:
        """All jobs were listed; their phases."""
        counts = Counter(phase or "Pending" for phase in phases)
        for phase in PHASES:
            self._jobs.labels(phase).set(counts[phase])
        self._resync.set_to_current_time()

    def told(self, before: RLHFJobStatus, after: RLHFJobStatus, first_ready: bool) -> None:
        """A status was written."""
        self._tries.inc(max((after.tries or 0) - (before.tries or 0), 0))
        if after.failures and after.failures != before.failures:
            last = after.failures[-1]
            self._failures.labels(last.kind, last.reason).inc()
        if first_ready and after.start_time:
            self._ready.observe(max(time.time() - parse_time(after.start_time).timestamp(), 0.0))

    def serve(self, port: int) -> int:
        """Serve `/metrics`, and tell the port."""
        server, _ = prometheus_client.start_http_server(port, ANY_ADDRESS, registry=self.registry)
        return int(server.server_port)


class Health:
    """Alive while resyncs come to an end, which also make up for a watch that went silent."""

    def __init__(self, longest_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            longest_seconds: the age of the last resync that is still healthy.
            clock: seconds.
        """
        self._longest, self._clock = longest_seconds, clock
        self._good_until = clock() + max(longest_seconds, FIRST_RESYNC_SECONDS)

    def resynced(self) -> None:
        """A resync came to its end."""
        self._good_until = self._clock() + self._longest

    @property
    def alive(self) -> bool:
        """Whether the last resync is young enough."""
        return self._clock() <= self._good_until

    def serve(self, port: int) -> int:
        """Serve `/healthz`, and tell the port."""
        health = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer a probe."""
                alive = health.alive
                body = json.dumps({"alive": alive}).encode()
                self.send_response((200 if alive else 503) if self.path == "/healthz" else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_args: object) -> None:
                """Probes are not worth a line."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ANY_ADDRESS == "::" else socket.AF_INET

        server = Server((ANY_ADDRESS, port), Handler)
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        return server.server_port
