"""A GPU's memory that does not suffice, told with what to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf_api.errors import FieldError

from rlhf_runtime.errors import ResourceError

_ASKED = re.compile(r"Tried to allocate ([\d.]+ \w+)\..* total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


@contextmanager
def enough_memory(path: str, fix: str) -> Iterator[None]:
    """Tell that a GPU ran out of memory by what to change. Another try is worth it: memory may have been in pieces, or
    in use by a process that was about to end.

    Args:
        path: What needs the memory, by its place in the manifest.
        fix: What to change.

    Raises:
        ResourceError: in the place of what torch, or vLLM after it, raises for that.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and so are those of CUDA's libraries
        if "out of memory" not in str(error):
            raise
        asked = _ASKED.search(str(error))
        got = str(error).partition("\n")[0].rstrip(".")
        if asked:
            got = "CUDA out of memory ({} more of a GPU of {} with {} free)".format(*asked.groups())
        raise ResourceError(str(FieldError(path, got, "what fits on the GPU", fix))) from error
