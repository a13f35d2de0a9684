"""`python -m rlhf_runtime RUNTIME.json`: train one RuntimeConfig.

The config is parsed and the inputs are checked before torch, Ray or vLLM are imported, so that a mistake is answered
at once. The exit code tells what kind of end it was (`errors.py`); the last line of standard output is the summary as
JSON.
"""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rlhf_api import FieldError, RuntimeConfig, SpecError

from rlhf_runtime.errors import RLHFError

SHUTDOWN_SECONDS = 8
"""How long an interrupted run may take to end its workers and draw its curves."""


class Stopped(BaseException):
    """A signal asked the run to end."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(signal.Signals(signum).name)


def main() -> int:
    """Train the config named on the command line and return the exit code."""
    arguments = _parse_arguments()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, _stop)
    config = None
    try:
        config = read_config(arguments.config)
        _train(config)
    except Stopped as stop:
        print(f"Stopped by {stop}.", file=sys.stderr)
        return stop.exit_code
    except SpecError as error:
        print("\n".join(f"{arguments.config}: {problem}" for problem in error.errors), file=sys.stderr)
        return 2
    except RLHFError as error:
        print(f"{error}{_save_details(config) if error.__cause__ else ''}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        print(f"Unexpected {type(error).__name__}: {error}{_save_details(config)}", file=sys.stderr)
        return 1
    return 0


def read_config(path: Path) -> RuntimeConfig:
    """Read a RuntimeConfig.

    Raises:
        SpecError: when the file is missing, is not JSON, or is not a RuntimeConfig of this release.
    """
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise SpecError([FieldError("file", error.strerror or str(error), "a RuntimeConfig", "name a file")]) from None
    except ValueError as error:
        raise SpecError(
            [FieldError("document", f"no JSON ({error})", "a RuntimeConfig", "write it by `rlhf run`")]
        ) from None
    return RuntimeConfig.parse(document)


def _train(config: RuntimeConfig) -> None:
    _hush_libraries()
    from rlhf_runtime.preflight import preflight

    inputs = preflight(config)

    from rlhf_runtime.report import Report, sinks_of
    from rlhf_runtime.trainer import train

    report = Report(config, sinks_of(config))
    try:
        train(config, inputs, report)
    finally:
        print(json.dumps(asdict(report.summary())), flush=True)


def _hush_libraries() -> None:
    """Keep libraries' notes to their own developers out of what a user reads."""
    warnings.filterwarnings("ignore", module=r"torch|torchdata|tensordict")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_runtime",
        description="Train one RuntimeConfig, as `rlhf run` and the operator write it.",
        epilog="Exit codes: 0 done, 2 bad input, 3 a reward failed, 4 numbers not finite, 5 a worker or node was lost, "
        "130 interrupted, 1 anything else.",
    )
    parser.add_argument("config", type=Path, help="the RuntimeConfig as JSON")
    return parser.parse_args()


def _stop(signum: int, _frame: FrameType | None) -> NoReturn:
    """Unwind once; later signals change nothing, and an end that takes too long is cut short."""
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    cut = threading.Timer(SHUTDOWN_SECONDS, os._exit, (128 + signum,))
    cut.daemon = True
    cut.start()
    raise Stopped(signum)


def _save_details(config: RuntimeConfig | None) -> str:
    """Keep the traceback in the run folder and say where, so that the message stays the first thing seen."""
    if config is None:
        return ""
    path = Path(config.run_dir) / "error.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(traceback.format_exc())
    return f"\nDetails: {path}"


if __name__ == "__main__":
    sys.exit(main())
