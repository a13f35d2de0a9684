"""`python -m rlhf_runtime RUNTIME.json`: train one RuntimeConfig.

The config is parsed and the inputs are checked before torch, Ray or vLLM are imported, so that a mistake is answered
at once. The exit code tells what kind of end it was (`errors.py`); the last line of standard output is the summary as
JSON, with the end (`rlhf_api.run_end`).
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
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rlhf_api import FieldError, RuntimeConfig, SpecError
from rlhf_api.run_end import RunEnd
from rlhf_api.runtime_config import DRIVER_LOG

from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.errors import RLHFError

if TYPE_CHECKING:
    from rlhf_runtime.report import Report

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"
SHUTDOWN_SECONDS = 7
"""How long an interrupted run may take to end its workers and draw its curves."""
LOG_SECONDS = 1
"""How long one that is cut short waits for its log's storage."""


@dataclass
class Run:
    """What is known of a run so far."""

    config: RuntimeConfig | None = None
    """Once it was read."""
    report: "Report | None" = None
    """Once there is something to report."""
    log: DriverLog = field(default_factory=DriverLog)
    """Begun once the run folder is known to be this run's."""
    name: str | None = None
    """What this try of the job is called; by default as the job."""

    def last_line(self, end: RunEnd) -> str:
        """The summary of what was reported until now, with the run's end."""
        return end.line(asdict(self.report.summary()) if self.report else {})


class Interruption:
    """The handler of SIGINT and SIGTERM: unwinds the run once, and cuts an end short that takes too long.

    It raises KeyboardInterrupt for both, the one exception that Ray's waits let through at once.

    Args:
        run: What a run that is cut short tells of.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signum = signal.SIGINT
        self._armed = True

    @property
    def end(self) -> RunEnd:
        """The end that the signal brings, with what the shell says of a program that it ended."""
        return RunEnd.of(128 + self._signum, f"Stopped by {self._signum.name}.")

    def listen(self) -> None:
        """Handle the signals from now on; those that came before were held back by `rlhf run`."""
        for signum in SIGNALS:
            signal.signal(signum, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def ignore(self) -> None:
        """Let signals change nothing any more, up to the very end of the process."""
        self._armed = False
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)

    def _stop(self, signum: int, _frame: FrameType | None) -> None:
        if not self._armed:
            return
        self.ignore()
        self._signum = signal.Signals(signum)
        cut = threading.Timer(SHUTDOWN_SECONDS, self._cut_short)
        cut.daemon = True
        cut.start()
        raise KeyboardInterrupt

    def _cut_short(self) -> NoReturn:
        try:
            if sys.stdout.isatty():
                os.write(sys.stdout.fileno(), SHOW_CURSOR)
            message, last_line = f"{self.end.message}\n", f"{self._run.last_line(self.end)}\n"
            os.write(sys.stderr.fileno(), message.encode())
            os.write(sys.stdout.fileno(), last_line.encode())
            kept = threading.Thread(target=self._run.log.write, args=(message + last_line,), daemon=True)
            kept.start()
            kept.join(LOG_SECONDS)  # its storage may be what took too long
        finally:
            os._exit(self.end.exit_code)


def main() -> int:
    """Train the config named on the command line and return the exit code."""
    arguments = _parse_arguments()
    run = Run(name=arguments.name)
    interruption = Interruption(run)
    with run.log:
        try:
            interruption.listen()
            end = _end_of(arguments.config, run, arguments.resume)
            interruption.ignore()
        except KeyboardInterrupt:
            end = interruption.end
            print(end.message, file=sys.stderr)
        if run.report:
            end = end.model_copy(update={"progress": run.report.progress()})
        if run.report or not sys.stdout.isatty():  # a person who mistyped has read it already
            print(f"{run.last_line(end)}\n", end="", flush=True)  # one piece, also in the log
    return end.exit_code


def _end_of(path: Path, run: Run, resume: bool) -> RunEnd:
    """Train a config, tell what went wrong, and return how it ended."""
    message = details = ""
    try:
        run.config = read_config(path, resume)
        _train(run.config, run)
        return RunEnd.of(0)
    except SpecError as error:
        code, message = 2, "\n".join(f"{path}: {problem}" for problem in error.errors)
    except RLHFError as error:
        code, message = error.exit_code, str(error)
        details = _save_details(run.config) if error.__cause__ else ""
    except Exception as error:
        code, message = 1, f"Unexpected {type(error).__name__}: {error}"
        details = _save_details(run.config)
    print(f"{message}{details}", file=sys.stderr, flush=True)
    return RunEnd.of(code, message)


def read_config(path: Path, resume: bool = False) -> RuntimeConfig:
    """Read a RuntimeConfig, to go on from the newest whole checkpoint where it is asked for.

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
    config = RuntimeConfig.parse(document)
    if resume and config.checkpoint:
        return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": True})})
    return config


def _train(config: RuntimeConfig, run: Run) -> None:
    """Check the inputs while Ray starts, train, and leave no process behind, however it ends."""
    _hush_libraries()
    from rlhf_runtime.checkpoint.resume import find_checkpoint
    from rlhf_runtime.preflight import preflight

    with ExitStack() as ending:
        found = find_checkpoint(config.checkpoint)  # a folder with another run's checkpoints gets no line of this one
        run.log.begin(Path(config.run_dir) / DRIVER_LOG, run.name or config.name)
        prompts = preflight(config, meanwhile=lambda: _start_ray(config, ending))

        from rlhf_runtime.report import Report, sinks_of
        from rlhf_runtime.trainer import train

        run.report = Report(config, sinks_of(config, run.log))
        train(config, prompts, run.report, found)


def _start_ray(config: RuntimeConfig, ending: ExitStack) -> None:
    """Start Ray, to be left at the end: that kills the workers, busy ones too, and frees their pools."""
    from rlhf_runtime.single_controller import LocalCluster

    cluster = LocalCluster(config.local_nodes, config.python_path)
    ending.callback(cluster.shutdown)
    cluster.start()


def _hush_libraries() -> None:
    """Keep libraries' notes to their own developers out of what a user reads."""
    warnings.filterwarnings("ignore", module=r"torch|torchdata|tensordict")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_runtime",
        description="Train one RuntimeConfig, as `rlhf run` and the operator write it.",
        epilog="Exit codes: 0 done, 2 bad input, 3 a reward failed, 4 numbers not finite, 5 a worker or node was lost, "
        "6 a checkpoint could not be written, 130 interrupted, 1 anything else.",
    )
    parser.add_argument("config", type=Path, help="the RuntimeConfig as JSON")
    parser.add_argument("--try", dest="name", metavar="NAME", help=f"what this try is called in {DRIVER_LOG}")
    parser.add_argument("--resume", action="store_true", help="go on from checkpoints, if there are any")
    return parser.parse_args()


def _save_details(config: RuntimeConfig | None) -> str:
    """Keep the traceback in the run folder and say where, so that the message stays the first thing seen."""
    if config is None:
        return ""
    path = Path(config.run_dir) / "error.log"
    details = traceback.format_exc()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(details)
    except OSError:  # such as a full disk, which may be what the error is about
        return f"\n{details.rstrip()}"
    return f"\nDetails: {path}"


if __name__ == "__main__":
    sys.exit(main())
