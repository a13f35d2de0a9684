"""`rlhf dashboard` as its browser sees it: the proxy in a thread, and a client that was let in."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from urllib.parse import urlsplit

import httpx
from rlhf_operator.cli.dashboard_proxy import DashboardProxy
from rlhf_operator.cli.jobs import Jobs
from rlhf_operator.ray_jobs import Head


@dataclass
class Shown:
    """A dashboard that is shown.

    Attributes:
        url: What is printed.
        browser: One that opened it.
    """

    url: str
    browser: httpx.Client

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def door(self) -> str:
        return urlsplit(self.url).path

    @property
    def cookie(self) -> str:
        return "; ".join(f"{name}={value}" for name, value in self.browser.cookies.items())

    def raw(self, path: str, **headers: str) -> HTTPResponse:
        """The answer to a request whose path and headers nothing has tidied."""
        connection = HTTPConnection(self.address, timeout=10)
        connection.putrequest("GET", path, skip_host=True, skip_accept_encoding=True)
        for name, value in ({"Host": self.address} | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        answer.read()
        return answer


@contextmanager
def shown(cluster: Jobs, head: Head, name: str = "job") -> Iterator[Shown]:
    """The dashboard of a head, while the context lasts."""
    urls: queue.Queue[str] = queue.Queue()
    stop: list[asyncio.Event] = []

    async def serve() -> None:
        stop.append(asyncio.Event())
        async with DashboardProxy(cluster, name, head).serving(0) as url:
            urls.put(url)
            await stop[0].wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        url = urls.get(timeout=10)
        with httpx.Client(base_url=url.partition("?")[0], timeout=10) as browser:
            browser.get(url)
            yield Shown(url, browser)
    finally:
        loop.call_soon_threadsafe(stop[0].set)
        thread.join()
        loop.close()
