"""`rlhf dashboard`: Ray's dashboard of a job, in this machine's browser."""

import asyncio
import errno
import signal
import sys
import webbrowser
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rlhf_api import FieldError, SpecError
from rlhf_api.status import RLHFJobStatus

from rlhf_operator.cli.connection import FAILED, Context, Kubeconfig, Name, Namespace, connected
from rlhf_operator.cli.follow import Job, state_line
from rlhf_operator.cli.next_step import next_step
from rlhf_operator.cli.problems import RefusalError

if TYPE_CHECKING:
    from rlhf_operator.cli.dashboard_proxy import DashboardProxy
    from rlhf_operator.cli.jobs import Jobs


def dashboard(
    name: Name,
    port: Annotated[
        int | None,
        typer.Option(metavar="PORT", min=1024, max=65535, help="of this machine (default: a free one)"),
    ] = None,
    browser: Annotated[bool, typer.Option(help="open it, where there is a terminal and a browser")] = True,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show Ray's dashboard of a job that has a RayCluster, until Ctrl-C.

    The URL that is printed lets in whoever has it, with Ray's token, which the browser never sees.
    """
    with connected(namespace, context, kubeconfig) as cluster:
        job = cluster.find(name)
        asyncio.run(_show(cluster, name, job, port, browser and _can_open()))


async def _show(cluster: "Jobs", name: str, job: Job, port: int | None, browser: bool) -> None:
    proxy, ended = await _proxy(cluster, name, job), asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    try:
        async with proxy.serving(port or 0) as url:
            typer.echo(url)
            typer.echo("Whoever has this URL gets in. Ctrl-C ends it.", err=True)
            async with _opened(url) if browser else nullcontext():
                await ended.wait()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        fix = "leave it out, or give another"
        raise RefusalError(FieldError("--port", f"{port}, which is taken", "a free port", fix)) from None


async def _proxy(cluster: "Jobs", name: str, job: Job) -> "DashboardProxy":
    """A proxy that is known to work.

    Raises:
        RefusalError: without a RayCluster, or where its head does not answer.
    """
    from rlhf_operator.cli.dashboard_proxy import DashboardProxy
    from rlhf_operator.cli.jobs import UnreachableError

    ray_cluster = (job.get("status") or {}).get("rayCluster")
    if not ray_cluster:
        expected = "one to show the dashboard of"
        raise RefusalError(FieldError(name, f"no RayCluster ({state_line(job)})", expected, _next(name, job)), FAILED)
    try:
        proxy = DashboardProxy(cluster, name, await asyncio.to_thread(cluster.head, ray_cluster))
        await proxy.prove()
    except UnreachableError as error:
        got, fix = f"no dashboard of {ray_cluster} ({error})", f"try again; `rlhf status {name}` tells how it fares"
        raise RefusalError(FieldError(name, got, "one that answers", fix), FAILED) from None
    return proxy


def _next(name: str, job: Job) -> str:
    with suppress(SpecError):
        return next_step(name, RLHFJobStatus.read(job.get("status")))
    return f"`rlhf get {name} -o yaml` shows the status as it is"


def _can_open() -> bool:
    """Whether there is a browser with a window of its own: one in the terminal shows none of a dashboard."""
    if not sys.stdout.isatty():
        return False
    try:
        return type(webbrowser.get()) not in (webbrowser.GenericBrowser, webbrowser.Elinks)
    except webbrowser.Error:
        return False


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[None]:
    """Open a page of one's own that leads to a URL: what stands in a command line, every user of a machine can see."""
    with TemporaryDirectory(prefix="rlhf-dashboard-") as folder:
        page = Path(folder) / "dashboard.html"
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0;url={url}">')
        await asyncio.to_thread(webbrowser.open, page.as_uri())
        yield
