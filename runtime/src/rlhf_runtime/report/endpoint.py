"""The driver's HTTP endpoint: `/progress` as JSON, `/metrics` for Prometheus, `/healthz`.

Its threads read a snapshot that the trainer replaces at the end of a step, so neither waits for the other.
"""

import hmac
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from rlhf_api import RuntimeConfig

from rlhf_runtime.report.progress import Snapshot, gauges_of, newest_checkpoint, progress_of
from rlhf_runtime.report.sink import StepRecord
from rlhf_runtime.report.summary import Summary
from rlhf_runtime.types import StepMetrics

EVERYWHERE, HERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0", "127.0.0.1"
"""Addresses to listen on: all of a pod's, of IPv4 as of IPv6, and this machine's own."""
IDLE_SECONDS = 10
"""How long a connection may say nothing."""
TOKEN_HEADERS = ("Authorization", "X-Ray-Authorization")
"""Where a token may stand, as for Ray's own ports: the API server's proxy strips the first."""

logger = logging.getLogger(__name__)


def ray_token(environment: Mapping[str, str]) -> str | None:
    """The token that Ray's own ports ask for, found where Ray looks for it; None where they ask for none.

    Raises:
        OSError: when the file that is to hold it cannot be read.
    """
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = environment.get("RAY_AUTH_TOKEN_PATH")
    if path is None and environment.get("RAY_AUTH_MODE", "").lower() == "token":
        path = str(Path.home() / ".ray" / "auth_token")
    return None if path is None else Path(path).read_text().strip()


class ProgressEndpoint:
    """The sink behind the endpoint.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 lets the system choose.
        token: What a request has to bring, but for `/healthz`; None lets everyone read.
    """

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        self._address = (host, port)
        self._token = token
        self._rows: list[StepMetrics] = []
        self._server: _Server | None = None  # none where the port is taken

    @property
    def port(self) -> int | None:
        """Where it listens; None when it does not."""
        return self._server.server_address[1] if self._server else None

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        """Listen. A port that is taken ends no run: it is told, and the run goes on unseen."""
        self._rows += earlier
        self._name, self._steps = config.name, config.training.steps
        try:
            self._server = _Server(self._address, self._token, config)
        except OSError as error:
            logger.warning("No progress endpoint: port %d cannot be had (%s)", self._address[1], error.strerror)
            return
        self._show()
        threading.Thread(target=self._server.serve_forever, name="progress", daemon=True).start()

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        self._rows.append(record.metrics)
        self._show()

    def close(self, summary: Summary) -> None:
        """Stop listening."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _show(self) -> None:
        if self._server:
            self._server.snapshot = Snapshot.of(self._name, self._steps, self._rows)


class _Server(ThreadingHTTPServer):
    """Answers from the newest snapshot. What is slow, such as a checkpoint's storage, keeps only its own request."""

    daemon_threads = True
    block_on_close = False
    snapshot: Snapshot

    def __init__(self, address: tuple[str, int], token: str | None, config: RuntimeConfig) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)
        self._token = None if token is None else token.encode()
        self._config = config

    def server_bind(self) -> None:
        """Bind the address; `::` takes IPv4 too, whatever the system's default."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def lets_in(self, given: str) -> bool:
        """Whether a header's value is the token, told in the same time whatever it is. An empty token lets none in."""
        scheme, _, token = given.partition(" ")
        same = hmac.compare_digest(token.strip().encode(), self._token or b"")
        return scheme.lower() == "bearer" and same and bool(self._token)

    def is_open_to(self, headers: Mapping[str, str]) -> bool:
        """Whether a request may read."""
        return self._token is None or any(self.lets_in(headers.get(name, "")) for name in TOKEN_HEADERS)

    def progress(self) -> bytes:
        """The body of `/progress`."""
        progress = progress_of(self.snapshot, newest_checkpoint(self._config))
        return progress.model_dump_json(by_alias=True).encode()

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The body of `/metrics` and its content type, as a scraper asks for it."""
        encode, content_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(_Gauges(self.snapshot))
        return encode(registry), content_type

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is nobody's concern; anything else is logged without what it sent."""
        logger.debug("A request from %s failed", client_address, exc_info=True)


class _Gauges(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return gauges_of(self._snapshot)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "rlhf", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        answer = self._answers().get(path)
        if path == "/healthz":
            self._send(HTTPStatus.OK, b"ok\n", "text/plain")
        elif not self.server.is_open_to(self.headers):
            self._send(HTTPStatus.UNAUTHORIZED, b"the token of this Ray cluster is needed\n", "text/plain")
        elif answer is None:
            self._send(HTTPStatus.NOT_FOUND, b"/progress, /metrics or /healthz\n", "text/plain")
        else:
            self._send(HTTPStatus.OK, *answer())

    def _answers(self) -> dict[str, Callable[[], tuple[bytes, str]]]:
        return {
            "/progress": lambda: (self.server.progress(), "application/json"),
            "/metrics": lambda: self.server.metrics(self.headers.get("Accept", "")),
        }

    def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # as the base class has it
        """Say nothing: a scrape a few seconds would fill the log."""
