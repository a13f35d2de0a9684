"""How a command tells that its input is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rlhf_api import SpecError

BAD_INPUT = 2
"""Exit code for a mistake that is the user's to mend."""


@contextmanager
def told(file: Path) -> Iterator[None]:
    """Tell every problem of `file` on a line of its own, and exit."""
    try:
        yield
    except SpecError as error:
        for problem in error.errors:
            typer.echo(problem if problem.path.startswith(str(file)) else f"{file}: {problem}", err=True)
        raise typer.Exit(BAD_INPUT) from None
