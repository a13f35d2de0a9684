"""Ray's job HTTP API and the driver's progress: the only file that speaks to a head.

A head is reached by its service's name, or from outside of the cluster through the API server's service proxy. That
proxy strips `Authorization`, so the token goes in `X-Ray-Authorization`, which Ray takes too.
"""

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import httpx
from pydantic import ValidationError
from rlhf_api.runtime_config import PROGRESS_PORT
from rlhf_api.status import Progress

from rlhf_operator.kube import Access
from rlhf_operator.manifests.ports import DASHBOARD
from rlhf_operator.observe import ClusterView, DriverView

CONNECT_SECONDS, ANSWER_SECONDS = 3.0, 10.0
SILENT_SECONDS = 300.0
"""How long a log that is followed may stay silent before its connection counts as lost."""
POLL_SECONDS = 0.5
"""Between two looks of Ray's at a log that is followed."""
ANSWER_BYTES = 1 << 20
"""Longest answer that is read. Some of it a job's own program writes, which must not fill the operator's memory."""
END_LINES, END_BYTES = 100, 16_384
"""Lines of a log's end that are asked for to learn how the driver ended, and bytes of them that are kept."""
TOKEN_KEY = "auth_token"
"""Key of the Secret that KubeRay makes for a cluster's token."""
Answer = httpx.Response
"""What a head answers, as it comes."""
STATES: Mapping[str, Any] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


@dataclass(frozen=True)
class Head:
    """A Ray head, and the token that it asks for."""

    namespace: str
    service: str
    token: str | None = None

    def proxied(self, port: int) -> str:
        """Path of one of its ports on the API server, by way of the service proxy."""
        return f"/api/v1/namespaces/{self.namespace}/services/{self.service}:{port}/proxy"


def head_of(cluster: ClusterView, secret: Mapping[str, Any] | None) -> Head:
    """How a cluster's head is reached.

    Args:
        cluster: the RayCluster.
        secret: the Secret of its name; None where there is none.
    """
    try:
        token = base64.b64decode((secret or {}).get("data", {})[TOKEN_KEY]).decode()
    except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
        token = None
    return Head(cluster.namespace, cluster.head_service or f"{cluster.name}-head-svc", token)


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    @property
    def ok(self) -> bool:
        return httpx.codes.is_success(self.status)

    def mapping(self) -> dict[str, Any]:
        """The body of an answer that has to be a JSON object."""
        if not self.ok:
            raise UnreachableError(f"it answered {self.status}")
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise UnreachableError("its answer is not JSON")
        return body


class RefusedError(Exception):
    """Ray's job API did not take a submission; the message is Ray's."""


class UnreachableError(Exception):
    """Ray's job API did not answer, or not sensibly; the message names no port or address that would vary."""


class RayJobs:
    """The job APIs of all heads, over one pool of connections."""

    def __init__(self, proxy: Access | None = None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Prepare connections.

        Args:
            proxy: the API server whose service proxy is taken; None to reach services by their names.
            transport: in the place of the network, for tests.
        """
        self._proxy = proxy
        self._client = httpx.AsyncClient(
            verify=proxy.tls if proxy else True,
            # A request looks at each idle connection. Heads are asked seldom, and through the proxy they share some.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=10, keepalive_expiry=30),
            transport=transport,
            trust_env=False,
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def look(self, head: Head, submission_id: str) -> DriverView:
        """Ray's word about a submission, with its progress while it runs and its log's end once it has ended.

        A head that does not answer is an answer too: `unreachable`.
        """
        try:
            answer = await self._send(head, "GET", DASHBOARD.number, f"/api/jobs/{submission_id}")
            if answer.status == httpx.codes.NOT_FOUND and "does not exist" in answer.text:
                return DriverView("unknown")  # another 404 is a proxy's, which knows no such service
            info = answer.mapping()
            state = STATES[info["status"]]
            progress = await self._progress(head) if state == "running" else None
            log = "" if state in ("pending", "running") else await self._log_end(head, submission_id)
        except UnreachableError as error:
            return DriverView("unreachable", str(error))
        except (KeyError, TypeError):
            return DriverView("unreachable", "its answer has no known status")
        return DriverView(
            state,
            message=str(info.get("message") or ""),
            exit_code=info.get("driver_exit_code"),
            error_type=info.get("error_type"),
            log=log,
            progress=progress,
        )

    async def submit(self, head: Head, submission_id: str, entrypoint: str, metadata: Mapping[str, str]) -> None:
        """Give Ray a driver to run. Submitting it again changes nothing.

        Raises:
            RefusedError: when Ray does not take it.
            UnreachableError: when Ray does not answer.
        """
        body = {"entrypoint": entrypoint, "submission_id": submission_id, "metadata": dict(metadata)}
        answer = await self._send(head, "POST", DASHBOARD.number, "/api/jobs/", body)
        if answer.ok or "already exists" in answer.text:
            return
        if answer.status in (httpx.codes.BAD_REQUEST, httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            lines = answer.text.strip().splitlines() or ["no reason given"]
            raise RefusedError(f"Ray refused {submission_id} ({answer.status}): {lines[-1][:500]}")
        raise UnreachableError(f"it answered {answer.status}")

    async def _progress(self, head: Head) -> Progress | None:
        """What the driver's endpoint tells; None where it does not, which is no trouble of the driver's."""
        try:
            answer = await self._send(head, "GET", PROGRESS_PORT, "/progress")
            if not answer.ok:
                return None
            return Progress.model_validate_json(answer.body, by_alias=True, by_name=False, extra="ignore")
        except (UnreachableError, ValidationError):
            return None

    async def log(
        self, head: Head, submission_id: str, lines: int | None = None, follow: bool = False
    ) -> AsyncIterator[bytes]:
        """What a driver has written, a piece at a time.

        Args:
            head: its head.
            submission_id: its try.
            lines: so many last lines, at least one; None for the whole log.
            follow: go on with what it writes, without an end.

        Raises:
            UnreachableError: when Ray does not answer or does not know it, and when the connection is lost.
        """
        info = await self._send(head, "GET", DASHBOARD.number, f"/api/jobs/{submission_id}")
        node = info.mapping().get("driver_node_id")
        if not node:
            raise UnreachableError("its driver has not started")
        query = {"node_id": node, "submission_id": submission_id, "timeout": int(SILENT_SECONDS)}
        query |= {"lines": -1 if lines is None else lines}
        query |= {"interval": POLL_SECONDS} if follow else {}
        path = f"/api/v0/logs/{'stream' if follow else 'file'}?{urlencode(query)}"
        silent = SILENT_SECONDS if follow else ANSWER_SECONDS
        async with self._open(head, "GET", DASHBOARD.number, path, read_seconds=silent) as response:
            if not response.is_success:
                raise UnreachableError(f"it answered {response.status_code}")
            async for chunk in response.aiter_bytes():
                yield chunk

    def forward(
        self,
        head: Head,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: AsyncIterator[bytes] | None = None,
    ) -> AbstractAsyncContextManager[Answer]:
        """Another's request to the dashboard: within the context its answer, as it comes and whatever its status.

        Args:
            head: whose dashboard.
            method: of the request.
            path: with its query, beginning with `/`.
            headers: of the request; no credentials, which are ours.
            body: of the request.

        Raises:
            UnreachableError: when Ray does not answer, or the connection is lost within the context.
        """
        return self._open(head, method, DASHBOARD.number, path, body, SILENT_SECONDS, headers)

    async def _log_end(self, head: Head, submission_id: str) -> str:
        end = b""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                async for chunk in self.log(head, submission_id, END_LINES):
                    end = (end + chunk)[-END_BYTES:]
        except (UnreachableError, TimeoutError):
            return ""
        return end.decode(errors="replace")

    async def _send(
        self, head: Head, method: str, port: int, path: str, body: Mapping[str, Any] | None = None
    ) -> _Answer:
        """A request, and the whole of its answer, however slowly it trickles in."""
        content = b""
        try:
            async with asyncio.timeout(ANSWER_SECONDS), self._open(head, method, port, path, body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > ANSWER_BYTES:
                        raise UnreachableError("its answer is too long")
        except TimeoutError:
            raise UnreachableError("it did not answer in time") from None
        return _Answer(response.status_code, content)

    @asynccontextmanager
    async def _open(
        self,
        head: Head,
        method: str,
        port: int,
        path: str,
        body: Mapping[str, Any] | AsyncIterator[bytes] | None = None,
        read_seconds: float = ANSWER_SECONDS,
        more_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Answer]:
        """A request whose answer is read piece by piece within the context."""
        headers = {"Accept-Encoding": "identity"}  # compressed, a few bytes could become many
        if self._proxy:
            url = self._proxy.url + head.proxied(port) + path
            headers |= self._proxy.headers()
            headers |= {"X-Ray-Authorization": f"Bearer {head.token}"} if head.token else {}
        else:
            url = f"http://{head.service}.{head.namespace}.svc:{port}{path}"
            headers |= {"Authorization": f"Bearer {head.token}"} if head.token else {}
        headers |= more_headers or {}
        sent: dict[str, Any] = {"json": body} if body is None or isinstance(body, Mapping) else {"content": body}
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS, read=read_seconds)
        try:
            async with self._client.stream(method, url, headers=headers, timeout=timeout, **sent) as response:
                yield response
        except httpx.TimeoutException:
            raise UnreachableError("it did not answer in time") from None
        except (httpx.HTTPError, OSError):
            raise UnreachableError("no connection could be made") from None
