"""What Ray's errors say of a worker's end, without their lists of ids and guesses."""

import re

from ray.exceptions import OutOfMemoryError, RayError

_PID = re.compile(r"\bpid: (\d+)")
_EXIT = re.compile(r"exit code .*|.*\bmemory\b.*")
_USED = re.compile(r"[\d.]+GB used / [\d.]+GB limit")


def reason(error: RayError) -> str:
    """Why a call failed, in Ray's own words."""
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError):
        used = _USED.search(text)
        return f"Ray killed workers as their node ran out of memory{f': {used[0]}' if used else ''}"
    words = text.split("The actor is dead because ")[-1].split("Some common causes")[0].strip(" .")
    return "its process ended without a word, as by SIGKILL" if words.endswith("End of file") else words


def exit_known(error: RayError) -> str:
    """What Ray knows of a worker's end beyond that it ended: an exit code, or that Ray ended it for memory."""
    known = _EXIT.search(reason(error))
    return known[0] if known else ""


def pid_of(error: RayError) -> int | None:
    """The worker's process."""
    found = _PID.search(str(error))
    return int(found[1]) if found else None
