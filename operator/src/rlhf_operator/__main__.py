"""Entry point of `rlhf` and `python -m rlhf_operator`: signals end it at once, without a traceback, from the start."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _end)
    from rlhf_operator.cli import app  # takes long enough for a person to press Ctrl-C

    app(prog_name="kubectl rlhf" if Path(sys.argv[0]).name == "kubectl-rlhf" else None)


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + signum)


if __name__ == "__main__":
    main()
