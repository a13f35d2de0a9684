"""Which storage holds a path of a manifest."""

import posixpath
from collections.abc import Sequence

from rlhf_api.spec import Storage


def volume_of(path: str, storage: Sequence[Storage]) -> Storage | None:
    """The innermost storage that holds an absolute path."""
    normal = posixpath.normpath(path)
    holders = [volume for volume in storage if below(normal, volume.mount_path) is not None]
    return max(holders, key=lambda volume: len(posixpath.normpath(volume.mount_path)), default=None)


def below(path: str, folder: str) -> str | None:
    """`path` relative to `folder`, or None where it is not inside."""
    folder = posixpath.normpath(folder).rstrip("/")
    return path[len(folder) + 1 :] if path == folder or path.startswith(f"{folder}/") else None
