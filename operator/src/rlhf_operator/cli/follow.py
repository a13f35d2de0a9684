"""The commands that stay: wait, and delete --wait. Each looks again every second."""

import time
from typing import Annotated, Any, Literal

import typer
from rlhf_api.status import ConditionType

from rlhf_operator.cli.cluster import KIND
from rlhf_operator.cli.connection import FAILED, Context, Kubeconfig, Name, Names, Namespace, bad_input, connected
from rlhf_operator.cli.durations import seconds_in

LOOK_SECONDS = 1.0
"""Between two looks at a job."""
TIMED_OUT = 124
"""Exit code of a wait that took too long, as of timeout(1)."""

Job = dict[str, Any]
"""An RLHFJob as the API server gives it."""
Outcome = Literal["reached", "hopeless", "open"]
Timeout = Annotated[str, typer.Option(metavar="DURATION", help="how long at most, such as 90s, 10m or 1h30m")]


def wait(
    name: Name,
    condition: Annotated[ConditionType, typer.Option("--for", help="condition to wait for")] = "Succeeded",
    timeout: Timeout = "1d",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    r"""Wait until a job has succeeded, or another condition holds, and tell each change meanwhile.

    Exit codes: 0 it holds, 1 the job ended otherwise or was deleted, 124 time is up, 2 no such job or no access.

    \b
      rlhf wait job                                  until it has succeeded
      rlhf wait job --for Training --timeout 30m     until it trains
    """
    deadline = time.monotonic() + _seconds(timeout)
    said = ""
    with connected(namespace, context, kubeconfig) as cluster:
        job: Job | None = cluster.find(name)
        while True:
            if (line := state_line(job)) != said:
                typer.echo(line)
                said = line
            match outcome(job, condition):
                case "reached":
                    return
                case "hopeless":
                    raise typer.Exit(FAILED)
            if time.monotonic() >= deadline:
                typer.echo(f"{name}: not {condition} after {timeout}", err=True)
                raise typer.Exit(TIMED_OUT)
            time.sleep(LOOK_SECONDS)
            job = cluster.look_again(name, job)


def outcome(job: Job | None, wanted: ConditionType) -> Outcome:
    """Whether a job has come to a condition, or never will any more. One that succeeded has trained.

    Args:
        job: as it is now; None for one that is gone.
        wanted: what is waited for.
    """
    if job is None:
        return "hopeless"
    conditions = (job.get("status") or {}).get("conditions") or []
    true = {condition["type"] for condition in conditions if condition["status"] == "True"}
    passed = {"Accepted", "ClusterReady", "Training"} if "Succeeded" in true else set()
    if wanted in true | passed:
        return "reached"
    return "hopeless" if true & {"Succeeded", "Failed"} else "open"


def state_line(job: Job | None) -> str:
    """The phase of a job, and why."""
    if job is None:
        return "It was deleted."
    status = job.get("status") or {}
    message = " ".join((status.get("message") or "").split())
    return f"{status.get('phase') or 'Not looked at yet'}{': ' if message else ''}{message}"


def delete(
    names: Names,
    wait: Annotated[bool, typer.Option("--wait", help="until their RayClusters and pods are gone as well")] = False,
    timeout: Timeout = "5m",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Delete jobs, with all that runs for them. What they wrote on volumes stays."""
    deadline = time.monotonic() + _seconds(timeout)
    with connected(namespace, context, kubeconfig) as cluster:
        for name in names:
            cluster.delete(name)
            typer.echo(f"{KIND}/{name} deleted")
        for name in names if wait else []:
            while left := list(cluster.remains(name)):
                if time.monotonic() >= deadline:
                    typer.echo(f"{name}: after {timeout} there still is {', '.join(left)}", err=True)
                    raise typer.Exit(TIMED_OUT)
                time.sleep(LOOK_SECONDS)


def _seconds(timeout: str) -> float:
    try:
        return seconds_in(timeout)
    except ValueError:
        fix = "write such as 90s, 10m or 1h30m"
        raise bad_input(f"--timeout: got `{timeout}`; expected a duration. Fix: {fix}") from None
