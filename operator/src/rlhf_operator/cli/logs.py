"""`rlhf logs`: what a job's drivers write."""

import asyncio
import codecs
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_operator.cli import follow as following
from rlhf_operator.cli.connection import FAILED, Context, Kubeconfig, Name, Namespace, connected
from rlhf_operator.cli.follow import Job, outcome, state_line
from rlhf_operator.manifests.names import submission_id

if TYPE_CHECKING:
    from rlhf_operator.cli.jobs import Jobs

Try = tuple[str, str]
"""The name of a RayCluster, and Ray's id of a try on it."""


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="until the job ends, over all its tries")] = False,
    tail: Annotated[int | None, typer.Option(metavar="LINES", min=0, help="begin with the last lines alone")] = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Print what a job's driver writes: one line a step, and at the end the summary as JSON.

    With -f the exit code is 0 if the job succeeds, and 1 if it does not.
    """
    with connected(namespace, context, kubeconfig) as cluster:
        job = cluster.find(name)
        if follow:
            last = asyncio.run(_follow(cluster, name, job, tail))
            typer.echo(state_line(last), err=True)
            _tell_where(name, last)
            raise typer.Exit(0 if outcome(last, "Succeeded") == "reached" else FAILED)
        if trouble := asyncio.run(_print(cluster, job, tail)):
            typer.echo(f"{name}: no log can be had now ({trouble}). {state_line(job)}", err=True)
            _tell_where(name, job)
            raise typer.Exit(FAILED)


def try_of(job: Job | None) -> Try | None:
    """The newest try of a job on a RayCluster that it still has; None where there is none."""
    status = (job or {}).get("status") or {}
    cluster, number = status.get("rayCluster"), status.get("try")
    if not cluster:
        return None
    if submission := status.get("submissionId"):
        return cluster, submission
    return (cluster, submission_id(job["metadata"]["name"], status["cluster"], number)) if job and number else None


def _tell_where(name: str, job: Job | None) -> None:
    """Say where the log of a job is that has no RayCluster any more."""
    from pydantic import ValidationError
    from rlhf_api import RLHFJobSpec

    from rlhf_operator.cli.kept_log import kept_log

    if job is None or not _is_gone(job):
        return
    with suppress(ValidationError):  # a spec of another release, of which it is not known
        typer.echo(kept_log(name, RLHFJobSpec.model_validate(job["spec"], by_alias=True, by_name=False)), err=True)


def _is_gone(job: Job) -> bool:
    """Whether a job had tries and has no RayCluster now."""
    return try_of(job) is None and bool((job.get("status") or {}).get("tries"))


async def _print(cluster: "Jobs", job: Job, tail: int | None) -> str | None:
    """Print the log of the newest try; why it cannot be had, if so."""
    if (newest := try_of(job)) is None:
        return "the RayCluster of its last try is gone" if _is_gone(job) else "no driver was submitted yet"
    log = _Log(cluster, newest)
    await (log.print() if tail is None else log.print_last(tail))
    return log.trouble


async def _follow(cluster: "Jobs", name: str, job: Job | None, tail: int | None) -> Job | None:
    """Print the logs of all tries until the job ends; the job as it is then."""
    log: _Log | None = None
    reading: asyncio.Task[None] | None = None
    while outcome(job, "Succeeded") == "open":
        newest = try_of(job)
        if newest and (log is None or log.of != newest):
            if log:
                await _finish(log, reading)
                typer.echo(f"--- {newest[1]}", err=True)
            log, reading = _Log(cluster, newest, None if log else tail), None
        if log and reading is None:
            reading = asyncio.create_task(log.print(follow=True))
        await asyncio.sleep(following.LOOK_SECONDS)
        if reading and reading.done():
            reading.result()
            reading = None  # the connection was lost
        job = await asyncio.to_thread(cluster.look_again, name, job)
    if log:
        await _finish(log, reading)
    return job


async def _finish(log: "_Log", reading: asyncio.Task[None] | None) -> None:
    """Print what a try has written since Ray last looked at its log."""
    if reading:
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()
    await log.print()


class _Log:
    """The log of one try, each byte of which is printed once, however often it is read."""

    def __init__(self, cluster: "Jobs", of: Try, tail: int | None = None) -> None:
        self.of = of
        self.trouble: str | None = None
        """Why it could not be read to its end."""
        self._cluster = cluster
        self._tail = tail
        self._printed = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    async def print(self, follow: bool = False) -> None:
        """Print what was not printed yet, at first but the tail; until it is cancelled or cut off with `follow`."""
        if self._tail is not None:
            await self._skip_to_last(self._tail)
            if self.trouble:
                return
            self._tail = None
        position = 0
        async for chunk in self._chunks(follow=follow):
            new = chunk[max(self._printed - position, 0) :]
            position += len(chunk)
            if new:
                self._printed = position
                typer.echo(self._decoder.decode(new), nl=False)

    async def print_last(self, lines: int) -> None:
        """Print the last lines alone."""
        async for chunk in self._chunks(lines=max(lines, 1)):
            if lines:
                typer.echo(self._decoder.decode(chunk), nl=False)

    async def _skip_to_last(self, lines: int) -> None:
        """Count all but the last lines as printed. Ray tells neither a log's length nor lines by their place."""
        starts, position = deque([0], maxlen=lines + 1), 0
        async for chunk in self._chunks():
            starts.extend(position + found.end() for found in re.finditer(b"\n", chunk))
            position += len(chunk)
        if starts[-1] != position:
            starts.append(position)
        self._printed = starts[0]

    async def _chunks(self, lines: int | None = None, follow: bool = False) -> AsyncIterator[bytes]:
        from rlhf_operator.cli.jobs import UnreachableError

        self.trouble = None
        try:
            async for chunk in self._cluster.driver_log(*self.of, lines, follow):
                yield chunk
        except UnreachableError as error:
            self.trouble = str(error)
