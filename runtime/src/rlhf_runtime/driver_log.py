"""What a driver writes, kept in the run folder: Ray's own copy of it goes with the cluster."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO, cast


class DriverLog:
    """A file that gets what goes to standard output and standard error of this process.

    A context manager: afterwards both are as they were.

    Each piece is handed to the system as it is written, so that a driver that is killed loses nothing, and only after
    the streams themselves have it. A file that cannot be written ends no run: the reason is told once, and the lines of
    that time are missing. What native code writes past Python, such as the stack of a crash, is not in it.

    It is a stream itself, for what only the file is to have.
    """

    def __init__(self) -> None:
        self.screen: TextIO = sys.stdout
        """Standard output without the file."""
        self._path: Path | None = None
        self._file: int | None = None
        self._streams: tuple[TextIO, TextIO] | None = None

    def begin(self, path: Path, name: str) -> None:
        """Write to a file from now on, after what earlier runs wrote and a line that marks the beginning of this one.

        Args:
            path: The file; its folder is made.
            name: What this run is called there.
        """
        self._path, self._streams = path, (sys.stdout, sys.stderr)
        self.screen = sys.stdout
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            gap = "\n" if os.fstat(self._file).st_size else ""  # an earlier one may have ended within a line
            self.write(f"{gap}--- {name}, {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}\n")
        except OSError as error:
            self._tell(error)
        sys.stdout = cast(TextIO, _Both(sys.stdout, self))
        sys.stderr = cast(TextIO, _Both(sys.stderr, self))

    def write(self, text: str) -> int:
        """Write to the file alone."""
        if self._file is not None:
            try:
                os.write(self._file, text.encode(errors="backslashreplace"))
            except OSError as error:
                self._tell(error)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._streams:
            sys.stdout, sys.stderr = self._streams
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _tell(self, error: OSError) -> None:
        if self._path and self._streams:
            _, errors = self._streams
            errors.write(f"{self._path}: not all of this log is kept there ({error.strerror})\n")
            self._path = None  # once is enough


class _Both:
    """A stream whose text a DriverLog gets as well; in all else it is the stream."""

    def __init__(self, stream: TextIO, log: DriverLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        try:
            written = self._stream.write(text)
            self._stream.flush()  # before a storage that hangs could keep it back
        finally:
            self._log.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
