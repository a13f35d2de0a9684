"""A small API server over a real socket: as much of one as the command line needs."""

import json
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "c157a79031e1c40f85931829bc5fc552"
JOBS, CLUSTERS = (
    "apis/rlhf-operator.io/v1alpha1/namespaces/default/rlhfjobs",
    "apis/ray.io/v1/namespaces/default/rayclusters",
)
EVENTS, PODS = "api/v1/namespaces/default/events", "api/v1/namespaces/default/pods"
SECRETS = "api/v1/namespaces/default/secrets"
RAY = "api/v1/namespaces/default/services/job-1-head-svc:8265/proxy/api/"
"""Ray's job API behind the proxy."""
NODE = "n1"


class ApiServerDouble(ThreadingHTTPServer):
    """Keeps objects by path, as far as the commands need it, and what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        """What drivers wrote, by Ray's ids of their tries."""
        self.cuts = 0
        """Followed logs that are cut off after their first piece."""
        self.closed = threading.Event()
        self.refusals: dict[str, tuple[int, str]] = {}
        """Status and message by the method that is refused."""
        self.away: dict[str, int] = {}
        """Requests that are answered 503, by how their paths begin."""
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.kinds = {JOBS, CLUSTERS, EVENTS, PODS}
        self.looks = 0
        self.story: list[Any] = []
        """What happens to the job, one step at each look at it."""

    def answer(self, method: str, path: str, query: dict[str, str], body: Any, token: str) -> tuple[int, Any]:
        self.asked.append((method, path, query))
        if refused := self.refusals.get(method):
            return refused[0], status(*refused)
        for start in self.away:
            if path.startswith(start) and self.away[start]:
                self.away[start] -= 1
                return 503, status(503, "starting")
        if path.startswith(RAY):
            return self._ray(path.removeprefix(RAY), query) if token == f"Bearer {TOKEN}" else (401, "Unauthorized")
        kind = path if path in self.kinds else path.rpartition("/")[0]
        if kind not in self.kinds and not path.startswith((SECRETS, "api/")):
            known = [known for known in self.kinds if path == known.replace("/namespaces/default", "")]
            if not known:
                return 404, "404 page not found\n"
            path = known[0]
        if method == "GET" and path in self.kinds:
            items = [value for key, value in self.objects.items() if key.startswith(f"{path}/")]
            return 200, {"metadata": {"resourceVersion": "1"}, "items": items}
        if method == "GET":
            if path == f"{JOBS}/job" and self.story and (step := self.story.pop(0)) is not None:
                step(self)
            return (200, self.objects[path]) if path in self.objects else (404, status(404, "not found"))
        if method == "DELETE":
            return (200, status(200, "")) if self.objects.pop(path, None) else (404, status(404, "not found"))
        before = self.objects.get(path, {})
        after = merged(before, body)
        generation = before.get("metadata", {}).get("generation", 0) + (after["spec"] != before.get("spec"))
        after["metadata"] |= {"uid": "u1", "generation": generation}
        if "dryRun" not in query:
            self.objects[path] = after
        return 200, after

    def _ray(self, path: str, query: dict[str, str]) -> tuple[int, Any]:
        kind, _, name = path.rpartition("/")
        if kind == "jobs":
            known = name in self.logs
            return (200, {"status": "RUNNING", "driver_node_id": NODE}) if known else (404, "does not exist")
        assert (kind, query["node_id"]) == ("v0/logs", NODE)
        if name == "stream":
            return 200, self._followed(query["submission_id"])
        lines = self.logs[query["submission_id"]].splitlines(keepends=True)
        return 200, "".join(lines if query["lines"] == "-1" else lines[-int(query["lines"]) :])

    def _followed(self, submission: str) -> Iterator[str]:
        """A log as it grows, without an end, as Ray sends it."""
        sent = 0
        while not self.closed.wait(0.005):
            piece = self.logs[submission][sent:]
            sent += len(piece)
            if piece:
                yield piece
            if sent and self.cuts:
                self.cuts -= 1
                return

    def shutdown(self) -> None:
        self.closed.set()
        super().shutdown()


def merged(before: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    nested = {key: merged(before.get(key, {}), value) for key, value in patch.items() if isinstance(value, dict)}
    return {**before, **patch, **nested}


def status(code: int, message: str) -> dict[str, Any]:
    reasons = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid", 401: "Unauthorized"}
    return {"kind": "Status", "code": code, "reason": reasons.get(code, "Broken"), "message": message}


class _Handler(BaseHTTPRequestHandler):
    server: ApiServerDouble

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        path = parts.path.strip("/").replace("%3A", ":")
        token = self.headers.get("X-Ray-Authorization", "")
        code, answer = self.server.answer(self.command, path, query, json.loads(body or "null"), token)
        if isinstance(answer, Iterator):
            self._stream(answer)
            return
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, pieces: Iterator[str]) -> None:
        """An answer whose end is the connection's, cut off without notice by a client that goes."""
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):
            for piece in pieces:
                self.wfile.write(piece.encode())

    do_GET = do_PATCH = do_DELETE = do_POST = _serve  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
