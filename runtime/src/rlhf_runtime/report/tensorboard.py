"""TensorBoard events.

An event file is a sequence of records (TFRecord: length, its checksum, data, its checksum) of `Event` messages. Writing
them here takes the messages and the checksum from tensorboard and leaves alone the parts of it that import TensorFlow
where that is installed.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_api import RuntimeConfig

from rlhf_runtime.report.sink import StepRecord
from rlhf_runtime.report.summary import Summary
from rlhf_runtime.types import StepMetrics


class TensorBoard:
    """Scalars by step in a folder that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO  # from start to close

    def start(self, config: RuntimeConfig, earlier: Sequence[StepMetrics]) -> None:
        """Open a new event file, which of older ones leaves the steps that the run goes on after."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if earlier:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=int(earlier[-1]["step"]) + 1, session_log=start))

    def step(self, record: StepRecord) -> None:
        """Write the step's numbers."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary as Scalars

        values = [
            Scalars.Value(tag=key, simple_value=float(value))
            for key, value in record.metrics.items()
            if key != "step" and isinstance(value, int | float)
        ]
        self._write(Event(wall_time=time.time(), step=int(record.metrics["step"]), summary=Scalars(value=values)))

    def close(self, summary: Summary) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(
            length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        )
        self._file.flush()
