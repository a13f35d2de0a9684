"""A small Ray head over real HTTP: the part of the job API that the operator speaks, and the driver's progress."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

NODE = "0bb3fd91cf4463cb5bd7d85ef5dbb5b3c8a9e7ef07ca32c4b7d6d4d5"
"""Ray's id of the node that drivers run on."""


class FakeHead:
    """A head that keeps submissions.

    Attributes:
        token: What it asks for; None for nothing.
        jobs: Submissions by id, as Ray describes them.
        logs: Their logs.
        progress: What the driver's endpoint tells; None while there is none.
        broken: Whether it answers 500 to everything.
        headers: Those of the last request.
    """

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.token: str | None = "secret"
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.progress: dict[str, Any] | None = None
        self.broken = False
        self.headers: dict[str, str] = {}
        self.paths: list[str] = []
        self.url = f"http://127.0.0.1:{server.server_port}"

    def answer(self, method: str, path: str, headers: dict[str, str], body: Any) -> tuple[int, Any]:
        self.headers, local = headers, path.partition("/proxy")[2] or path
        self.paths.append(path)
        if self.broken:
            return 500, "Internal Server Error"
        given = headers.get("X-Ray-Authorization") or headers.get("Authorization")
        if self.token and given != f"Bearer {self.token}":
            return 401, "Unauthorized"
        if local == "/progress":
            return (200, self.progress) if self.progress else (404, "no driver")
        if method == "POST" and local == "/api/jobs/":
            return self._submit(body)
        if local.startswith("/api/v0/logs/file?"):
            return self._log(dict(parse_qsl(local.partition("?")[2])))
        name = local.removeprefix("/api/jobs/")
        if name not in self.jobs:
            return 404, f"Job {name} does not exist"
        return 200, {"driver_node_id": NODE, **self.jobs[name]}

    def _log(self, query: dict[str, str]) -> tuple[int, Any]:
        if query["node_id"] != NODE or query["submission_id"] not in self.jobs:
            return 500, "None of the nodes has it"
        lines = re.findall(r"[^\n]*\n|[^\n]+$", self.logs.get(query["submission_id"], ""))
        return 200, "".join(lines if query["lines"] == "-1" else lines[-int(query["lines"]) :])

    def _submit(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["submission_id"]
        if name in self.jobs:
            return 500, f"Traceback ...\nValueError: Job with submission_id {name} already exists. Use another."
        if not body["entrypoint"]:
            return 400, "Traceback ...\nTypeError: entrypoint must be a string"
        self.jobs[name] = {"status": "PENDING", **body}
        return 200, {"job_id": name, "submission_id": name}


@contextmanager
def fake_head(address: str = "127.0.0.1") -> Iterator[FakeHead]:
    """A head that listens while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            status, told = head.answer(method, self.path, dict(self.headers), body)
            data = (told if isinstance(told, str) else json.dumps(told)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(told, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            if not isinstance(sys.exception(), ConnectionError):  # a client may go before it has read all
                super().handle_error(request, client_address)

    server = Server((address, 0), Handler)
    head = FakeHead(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield head
    finally:
        server.shutdown()
        server.server_close()
