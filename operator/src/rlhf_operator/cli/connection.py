"""How commands reach a cluster, and how its refusals are told: one line, an exit code, never a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf_operator.cli.problems import BAD_INPUT, RefusalError

if TYPE_CHECKING:
    from rlhf_operator.cli.jobs import Jobs

FAILED = 1
"""Exit code where a user's input is not at fault."""

Namespace = Annotated[
    str | None,
    typer.Option("-n", "--namespace", metavar="NAME", help="namespace (default: the context's)", show_default=False),
]
Context = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="context (default: the kubeconfig's current one)", show_default=False),
]
Kubeconfig = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="kubeconfig (default: $KUBECONFIG, then ~/.kube/config)", show_default=False),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="a job's name", show_default=False)]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="names of jobs", show_default=False)]


@contextmanager
def connected(namespace: str | None, context: str | None, kubeconfig: str | None) -> Iterator["Jobs"]:
    """The jobs of a namespace; what the cluster refuses is told, and the command ends."""
    # The client takes longer to import than `rlhf validate` takes in all.
    from rlhf_operator.cli.jobs import Jobs, KubeError, NoClusterError, refusal_of

    try:
        yield Jobs.connect(namespace, context, kubeconfig)
        return
    except (KubeError, NoClusterError) as error:
        refusal = refusal_of(error)
    except RefusalError as error:
        refusal = error
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        typer.echo(f"Unexpected {type(error).__name__}: {error}", err=True)
        raise typer.Exit(FAILED) from None
    typer.echo(refusal, err=True)
    raise typer.Exit(refusal.exit_code)


def bad_input(message: str) -> typer.Exit:
    """Tell a mistake of the command line; the exit to raise."""
    typer.echo(message, err=True)
    return typer.Exit(BAD_INPUT)
