"""A head's dashboard on this machine, for one browser. Imports aiohttp, so its command imports this when it runs.

Whoever gets through acts with Ray's token, which is to run code in the cluster. So every request has to prove itself:

1. `Host` is this machine: a page whose name was made to point here (DNS rebinding) has another one.
2. Its path begins with the door, a random folder. The session's cookie is sent to this folder alone: all ports of a
   machine share their cookies, and another user may listen on one of them.
3. It carries that cookie. The door gives it in return for the key, which stands in the URL that is printed.
4. It is of no other site's page, and of no page on another port, which for a cookie is the same site.

What gets through reaches the head's dashboard and nothing else on the API server.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from html import escape
from urllib.parse import parse_qs, unquote

from aiohttp import hdrs, web
from rlhf_api import SpecError
from rlhf_api.status import RLHFJobStatus

from rlhf_operator.cli.follow import state_line
from rlhf_operator.cli.jobs import Jobs, KubeError, UnreachableError, refusal_of
from rlhf_operator.cli.tables import job_page
from rlhf_operator.manifests.ports import DASHBOARD
from rlhf_operator.ray_jobs import Answer, Head

COOKIE = "rlhf-dashboard"
PROOF_PATH = "/api/version"
"""Answered by a dashboard that works, to whom has the token."""
SENT_ON = (
    "Accept", "Accept-Encoding", "Accept-Language", "Cache-Control", "Content-Encoding", "Content-Length",
    "Content-Type", "If-Modified-Since", "If-None-Match", "If-Range", "Range",
    "Sec-Fetch-Dest", "Sec-Fetch-Mode", "Sec-Fetch-Site", "Sec-Fetch-User", "User-Agent",  # Ray lets browsers only read
)  # fmt: skip
"""The only headers of a request that go further."""
KEPT_BACK = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "set-cookie",
})  # fmt: skip
"""Headers of an answer that end here: those of a connection, and cookies, which all ports of this machine would get."""
LOOK_SECONDS = 5
"""Between two tries of a page whose head does not answer."""
CLOSE_SECONDS = 0.5
"""How long answers that are under way may go on once the command ends."""
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{after};url={url}"><title>{title}</title>
<body style="font-family: sans-serif; margin: 2em"><h1>{title}</h1>{body}</body></html>
"""

logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # what strangers send is not the user's concern


class DashboardProxy:
    """The dashboard of the RayCluster that a job has, and of the next one once it is lost."""

    def __init__(self, cluster: Jobs, name: str, head: Head) -> None:
        """Prepare connections.

        Args:
            cluster: the jobs of the namespace.
            name: the job's name.
            head: whose dashboard is shown first.
        """
        self._cluster, self._name, self._head = cluster, name, head
        self._rays = cluster.rays()
        self._door = f"/{secrets.token_urlsafe(16)}/"
        self._key, self._session = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._hosts: tuple[str, ...] = ()

    async def prove(self) -> None:
        """Ask the dashboard for a sign of life.

        Raises:
            UnreachableError: when there is none; the message says why.
        """
        async with self._rays.forward(self._head, "GET", PROOF_PATH, {}) as answer:
            await _whole(answer)

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[str]:
        """Listen while the context lasts: the URL that opens the dashboard.

        Args:
            port: 0 for one that is free.

        Raises:
            OSError: when the port is taken.
        """
        runner = web.ServerRunner(
            web.Server(self._answer, handler_cancellation=True, access_log=None), shutdown_timeout=CLOSE_SECONDS
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            bound = runner.addresses[0][1]
            self._hosts = (f"127.0.0.1:{bound}", f"localhost:{bound}")
            yield f"http://{self._hosts[0]}{self._door}?key={self._key}"
        finally:
            await runner.cleanup()
            await self._rays.close()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get(hdrs.HOST) not in self._hosts:
            return _refused(403, f"open it as http://{self._hosts[0]}, the address that was printed")
        path, _, query = request.raw_path.partition("?")
        if path == self._door and _same(parse_qs(query).get("key", [""])[0], self._key):
            return self._welcome()
        if not path.startswith(self._door) or not self._knows(request):
            return _refused(403, "open the URL that `rlhf dashboard` printed")
        if _strays(request.raw_path):
            return _refused(400, "the path leads elsewhere")
        return await self._forward(request, request.raw_path[len(self._door) - 1 :])

    def _knows(self, request: web.BaseRequest) -> bool:
        """Whether a request is of a page that was let in."""
        origin = request.headers.get(hdrs.ORIGIN)
        near = request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        near &= origin is None or origin.removeprefix("http://") in self._hosts
        return near and _same(request.cookies.get(COOKIE, ""), self._session)

    def _welcome(self) -> web.Response:
        """Exchange the key for the session.

        By a page, not a redirect: browsers send no strict cookie along a way that began at another site's link.
        """
        response = _page(200, f"Ray's dashboard of {self._name}", '<p><a href="./">Open</a></p>', after=0, url="./")
        response.set_cookie(COOKIE, self._session, path=self._door, httponly=True, samesite="Strict")
        return response

    async def _forward(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in SENT_ON if name in request.headers}
        body = request.content.iter_any() if request.body_exists else None
        head, streamed = self._head, web.StreamResponse()
        try:
            async with self._rays.forward(head, request.method, path, headers, body) as answer:
                if _is_html(answer) or answer.is_error:
                    return self._revised(answer, await _whole(answer), head)
                streamed.set_status(answer.status_code, answer.reason_phrase)
                streamed.headers.extend(self._passed_on(answer, head))
                await streamed.prepare(request)
                async for chunk in answer.aiter_raw():
                    await streamed.write(chunk)
        except UnreachableError as error:
            if not streamed.prepared:
                return await self._trouble(request, str(error))
            if request.transport:
                request.transport.close()  # an end that is one would pass half an answer off as a whole one
        return streamed

    def _revised(self, answer: Answer, body: bytes, head: Head) -> web.Response:
        """An answer with links that lead here, which the API server made lead to itself."""
        headers = self._passed_on(answer, head)
        for name in ("content-encoding", "content-length"):
            headers.pop(name, None)
        body = body.replace(f"{head.proxied(DASHBOARD.number)}/".encode(), self._door.encode())
        return web.Response(status=answer.status_code, reason=answer.reason_phrase, headers=headers, body=body)

    def _passed_on(self, answer: Answer, head: Head) -> dict[str, str]:
        own = {name.strip() for name in answer.headers.get("connection", "").lower().split(",")}
        headers = {name: value for name, value in answer.headers.items() if name not in KEPT_BACK | own}
        if location := headers.get("location"):
            _, led_back, path = location.partition(f"{head.proxied(DASHBOARD.number)}/")
            headers["location"] = self._door + path if led_back else location
        return headers

    async def _trouble(self, request: web.BaseRequest, why: str) -> web.Response:
        """What is said in the place of a dashboard that does not answer; to people, what they can do about it."""
        if "text/html" not in request.headers.get(hdrs.ACCEPT, ""):
            return web.Response(status=502, text=f"Ray's dashboard of {self._name} does not answer: {why}\n")
        status = await asyncio.to_thread(self._look_again)
        body = f"<p>{escape(why)}. This page tries again every {LOOK_SECONDS} seconds.</p><pre>{escape(status)}</pre>"
        title = f"Ray's dashboard of {self._name} does not answer"
        return _page(502, title, body, after=LOOK_SECONDS)

    def _look_again(self) -> str:
        """What `rlhf status` says. The head of the RayCluster that the job has now is asked from here on."""
        try:
            if (job := self._cluster.get(self._name)) is None:
                return state_line(None)
            status = job.get("status") or {}
            page = job_page(job, RLHFJobStatus.read(status), datetime.now(UTC))
            if status.get("rayCluster"):
                self._head = self._cluster.head(status["rayCluster"])
        except SpecError:
            return state_line(job)
        except KubeError as error:
            return str(refusal_of(error))
        except UnreachableError:
            pass
        return page


async def _whole(answer: Answer) -> bytes:
    """The body of an answer.

    Raises:
        UnreachableError: when it is not the dashboard's own, but the API server's about it, or a refusal of the token.
    """
    body = await answer.aread()
    if answer.is_error:
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if isinstance(said, Mapping) and (said.get("kind"), said.get("apiVersion")) == ("Status", "v1"):
            raise UnreachableError(" ".join(str(said.get("message") or "the API server refuses").split()))
        if answer.status_code in (401, 403):
            raise UnreachableError("Ray does not take the token of the RayCluster's Secret")
    return body


def _is_html(answer: Answer) -> bool:
    return str(answer.headers.get("content-type", "")).startswith("text/html")


def _strays(path: str) -> bool:
    """Whether someone on the way might read a path as one outside of the folder that it stands in."""
    decoded = path.partition("?")[0]
    while (once_more := unquote(decoded)) != decoded:
        decoded = once_more
    steps = decoded.replace("\\", "/").split("/")
    return "." in steps or ".." in steps or not (path.isascii() and path.isprintable())


def _same(given: str, expected: str) -> bool:
    return secrets.compare_digest(given.encode(errors="replace"), expected.encode())


def _refused(status: int, fix: str) -> web.Response:
    return web.Response(status=status, text=f"{status}: not let in. Fix: {fix}\n")


def _page(status: int, title: str, body: str, after: int, url: str = "") -> web.Response:
    """A page that moves on to another, or to itself, after some seconds."""
    text = PAGE.format(title=escape(title), body=body, after=after, url=url)
    headers = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
    return web.Response(status=status, text=text, content_type="text/html", headers=headers)
