"""The command line. One concern a file; here they become one program."""

from typing import Annotated

import typer

from rlhf_operator.cli.cluster import apply, events, get, resume, status, suspend
from rlhf_operator.cli.dashboard import dashboard
from rlhf_operator.cli.follow import delete, wait
from rlhf_operator.cli.local import export, plan, run, validate
from rlhf_operator.cli.logs import logs
from rlhf_operator.cli.render import render

HELP = """Train language models with reinforcement learning from one manifest.

On this machine:

\b
  rlhf validate examples/*.yaml           is it right?
  rlhf plan examples/01-quickstart.yaml   what would run where?
  rlhf run examples/01-quickstart.yaml    train here, into runs/quickstart
  rlhf export runs/quickstart my-model    a checkpoint as a Hugging Face folder
  rlhf render job.yaml                    what would be applied on a cluster?

On a cluster that has the operator (also as `kubectl rlhf ...`):

\b
  rlhf apply job.yaml                     run it there, or change it
  rlhf get -A                             all jobs: phase, step, reward, GPUs, tries
  rlhf status job                         one job, and what to do next
  rlhf logs -f job                        follow its driver
  rlhf dashboard job                      Ray's dashboard, in the browser
  rlhf wait job --for Training            for scripts: exit code 0, or 1 if it failed
  rlhf suspend job; rlhf resume job       free its GPUs, and go on later
  rlhf delete job --wait                  with all that runs for it

All mistakes in a manifest are told at once, as `path: got X; expected Y. Fix: Z`, with exit code 2.
"""

app = typer.Typer(
    help=HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # costs more than all of `rlhf validate`'s own work

        typer.echo(f"rlhf {version('rlhf-operator')}")
        raise typer.Exit


@app.callback()
def _root(
    asked: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    pass


LOCAL = (validate, plan, run, export, render)
ON_A_CLUSTER = (apply, get, status, logs, dashboard, events, wait, suspend, resume, delete)

for command in (*LOCAL, *ON_A_CLUSTER):
    app.command()(command)
