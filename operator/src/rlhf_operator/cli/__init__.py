"""The command line. One concern a file; here they become one program."""

from typing import Annotated

import typer

from rlhf_operator.cli.local import export, plan, run, validate
from rlhf_operator.cli.render import render

HELP = """Train language models with reinforcement learning from one manifest.

\b
  rlhf validate examples/*.yaml           is it right?
  rlhf plan examples/01-quickstart.yaml   what would run where?
  rlhf run examples/01-quickstart.yaml    train on this machine, into runs/quickstart
  rlhf export runs/quickstart my-model    a checkpoint as a Hugging Face folder
  rlhf render job.yaml                    what would be applied on a cluster?

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


for command in (validate, plan, run, export, render):
    app.command()(command)
