"""Ray's job HTTP API and the driver's progress: the only file that speaks to a head.

A head is reached by its service's name, or from outside of the cluster through the API server's service proxy. That
proxy strips `Authorization`, so the token goes in `X-Ray-Authorization`, which Ray takes too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError
from rlhf_api.runtime_config import PROGRESS_PORT
from rlhf_api.status import Progress

from rlhf_operator.kube import Access
from rlhf_operator.observe import DriverView

DASHBOARD_PORT = 8265
CONNECT_SECONDS, ANSWER_SECONDS = 3.0, 10.0
LOG_BYTES = 16_384
"""Bytes of a log's end that are read for how the driver ended."""
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
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=60),
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
            response = await self._send(head, "GET", DASHBOARD_PORT, f"/api/jobs/{submission_id}")
            if response.status_code == httpx.codes.NOT_FOUND and "does not exist" in response.text:
                return DriverView("unknown")  # another 404 is a proxy's, which knows no such service
            info = _mapping(response)
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
        response = await self._send(head, "POST", DASHBOARD_PORT, "/api/jobs/", body)
        if response.is_success or "already exists" in response.text:
            return
        if response.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            lines = response.text.strip().splitlines() or ["no reason given"]
            raise RefusedError(f"Ray refused {submission_id} ({response.status_code}): {lines[-1][:500]}")
        raise UnreachableError(f"it answered {response.status_code}")

    async def _progress(self, head: Head) -> Progress | None:
        """What the driver's endpoint tells; None where it does not, which is no trouble of the driver's."""
        try:
            response = await self._send(head, "GET", PROGRESS_PORT, "/progress")
            if not response.is_success:
                return None
            return Progress.model_validate_json(response.content, by_alias=True, by_name=False)
        except (UnreachableError, ValidationError):
            return None

    async def log(self, head: Head, submission_id: str) -> str:
        """All that a driver has written.

        Raises:
            UnreachableError: when Ray does not answer, or does not know it.
        """
        response = await self._send(head, "GET", DASHBOARD_PORT, f"/api/jobs/{submission_id}/logs")
        return str(_mapping(response).get("logs", ""))

    async def _log_end(self, head: Head, submission_id: str) -> str:
        try:
            return (await self.log(head, submission_id))[-LOG_BYTES:]
        except UnreachableError:
            return ""

    async def _send(
        self, head: Head, method: str, port: int, path: str, body: Mapping[str, Any] | None = None
    ) -> httpx.Response:
        headers: dict[str, str] = {}
        if self._proxy:
            service = f"/api/v1/namespaces/{head.namespace}/services/{head.service}:{port}/proxy"
            url = self._proxy.url + service + path
            headers |= self._proxy.headers()
            headers |= {"X-Ray-Authorization": f"Bearer {head.token}"} if head.token else {}
        else:
            url = f"http://{head.service}.{head.namespace}.svc:{port}{path}"
            headers |= {"Authorization": f"Bearer {head.token}"} if head.token else {}
        try:
            return await self._client.request(method, url, headers=headers, json=body)
        except httpx.TimeoutException:
            raise UnreachableError("it did not answer in time") from None
        except (httpx.HTTPError, OSError):
            raise UnreachableError("no connection could be made") from None


def _mapping(response: httpx.Response) -> dict[str, Any]:
    """The body of an answer that has to be a JSON object."""
    if not response.is_success:
        raise UnreachableError(f"it answered {response.status_code}")
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise UnreachableError("its answer is not JSON")
    return body
