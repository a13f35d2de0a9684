"""Where a run's results go: files, TensorBoard, the terminal, an endpoint, curves and a summary. One sink a file."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO, cast

from rich.console import Console
from rlhf_api import RuntimeConfig
from rlhf_api.runtime_config import PROGRESS_PORT
from rlhf_api.status import Progress

from rlhf_runtime.driver_log import DriverLog
from rlhf_runtime.errors import CheckpointError
from rlhf_runtime.report.console import TerminalView
from rlhf_runtime.report.curves import Curves
from rlhf_runtime.report.endpoint import EVERYWHERE, HERE, ProgressEndpoint, ray_token
from rlhf_runtime.report.jsonl import MetricsFile, SamplesFile
from rlhf_runtime.report.progress import Snapshot, newest_checkpoint, progress_of
from rlhf_runtime.report.sink import Sample, Sink, StepRecord
from rlhf_runtime.report.summary import Summary, summarize
from rlhf_runtime.report.tensorboard import TensorBoard
from rlhf_runtime.report.timeline import Timeline
from rlhf_runtime.types import StepMetrics

__all__ = ["Report", "Sample", "Sink", "StepRecord", "Summary", "sinks_of", "summarize"]


def sinks_of(config: RuntimeConfig, log: DriverLog) -> list[Sink]:
    """The sinks that a config asks for; files go into its run folder.

    They are closed in reverse: the curves, which take a second or two, keep nobody waiting for the rest.

    Args:
        config: The job.
        log: It gets plain lines, also where a terminal has a live view.
    """
    folder = Path(config.run_dir)
    sinks: list[Sink] = [
        Curves(folder / "curves.png"),
        MetricsFile(folder / "metrics.jsonl"),
        Timeline(folder / "timeline.json"),
        TerminalView(Console(file=log.screen)),
        TerminalView(Console(file=cast(TextIO, log), force_terminal=False)),
    ]
    if config.observability.samples_per_step:
        sinks.append(SamplesFile(folder / "samples.jsonl"))
    if config.observability.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.local_nodes is None:
        sinks.append(ProgressEndpoint(EVERYWHERE, PROGRESS_PORT, ray_token(os.environ)))
    elif config.observability.prometheus:
        sinks.append(ProgressEndpoint(HERE, PROGRESS_PORT, ray_token(os.environ)))
    return sinks


class Report:
    """Hands every step to every sink, and closes each of them whatever happened to the others.

    Raises:
        CheckpointError: by `start`, `step` and `close`, when the run folder takes nothing, as on a full disk.
    """

    def __init__(self, config: RuntimeConfig, sinks: Sequence[Sink]) -> None:
        self._config = config
        self._sinks = sinks
        self._rows: list[StepMetrics] = []
        self._closing = ExitStack()

    @property
    def rows(self) -> Sequence[StepMetrics]:
        """The metrics of all steps."""
        return self._rows

    def start(self, earlier: Sequence[StepMetrics] = ()) -> None:
        """Open the sinks.

        Args:
            earlier: The steps that the run goes on after.
        """
        self._rows += earlier
        with self._told():
            for sink in self._sinks:
                sink.start(self._config, earlier)
                self._closing.callback(lambda sink=sink: sink.close(self.summary()))

    def step(self, record: StepRecord) -> None:
        """Report a finished step."""
        self._rows.append(record.metrics)
        with self._told():
            for sink in self._sinks:
                sink.step(record)

    def summary(self) -> Summary:
        """The run up to now."""
        return summarize(self._rows, self._config.training.steps)

    def progress(self) -> Progress:
        """How far the run got, with its newest checkpoint."""
        snapshot = Snapshot.of(self._config.name, self._config.training.steps, self._rows)
        return progress_of(snapshot, newest_checkpoint(self._config))

    def close(self) -> Summary:
        """Close the sinks, once, after the last step or an interruption, and return the summary."""
        with self._told():
            self._closing.close()
        return self.summary()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self._config.run_dir}: got `{error.strerror or error}` while writing what the run reports; expected "
                "room and the right to write there. Fix: free space, then go on from the last whole checkpoint with "
                "`rlhf run --resume`"
            ) from None
