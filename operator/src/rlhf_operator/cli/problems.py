"""How a command tells that its input is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rlhf_api import FieldError, SpecError

BAD_INPUT = 2
"""Exit code for a mistake that is the user's to mend."""


class RefusalError(Exception):
    """What ends a command: one line for people, and an exit code."""

    def __init__(self, problem: FieldError, exit_code: int = BAD_INPUT) -> None:
        self.exit_code = exit_code
        super().__init__(str(problem))


@contextmanager
def told(file: Path) -> Iterator[None]:
    """Tell every problem of `file` on a line of its own, and exit."""
    try:
        yield
    except SpecError as error:
        for problem in error.errors:
            typer.echo(problem if problem.path.startswith(str(file)) else f"{file}: {problem}", err=True)
        raise typer.Exit(BAD_INPUT) from None
