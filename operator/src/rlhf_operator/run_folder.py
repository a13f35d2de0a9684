"""The folder of a run: no run writes over another's, and one process at a time has it."""

import fcntl
import itertools
import os
from pathlib import Path

from rlhf_api import FieldError, RLHFJob, RuntimeConfig, SpecError
from rlhf_api.checkpoint import CHECKPOINT_FOLDERS
from ruamel.yaml import YAML

LOCK = ".lock"


def holds_checkpoints(path: Path) -> bool:
    """Whether there is a checkpoint in a folder, be it whole or damaged."""
    return any(path.glob(CHECKPOINT_FOLDERS))


def prepare(folder: Path, resume: bool = False) -> Path | None:
    """Make a folder for a run, and hold it for as long as this process lives, programs that it becomes included.

    Args:
        folder: The folder.
        resume: Take the folder that is there, to go on in it; otherwise an empty one is made.

    Returns:
        Where the folder of an earlier run of that name was moved: the first free of `NAME.1`, `NAME.2`, ...

    Raises:
        SpecError: when a run still has the folder, or it cannot be made.
    """
    try:
        moved = _move_aside(folder) if folder.exists() and not resume else None
        folder.mkdir(parents=True, exist_ok=resume)
        _lock(folder)
    except BlockingIOError:
        got, fix = f"{folder}, where a run is going on", "wait for it, stop it, or rename this job"
        raise SpecError([FieldError("--runs-dir", got, "a free folder", fix)]) from None
    except OSError as error:
        raise _not_writable(folder, error) from None
    return moved


def write(folder: Path, job: RLHFJob, config: RuntimeConfig) -> Path:
    """Write the job with every default as `job.yaml`, and the runtime's config, whose path is returned.

    Raises:
        SpecError: when they cannot be written, as on a full disk.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # its stub says None
    runtime = folder / "runtime.json"
    try:
        with (folder / "job.yaml").open("w", encoding="utf-8") as file:
            yaml.dump(job.model_dump(mode="json", by_alias=True), file)
        runtime.write_text(config.model_dump_json(by_alias=True, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise _not_writable(folder, error) from None
    return runtime


def _not_writable(folder: Path, error: OSError) -> SpecError:
    got = f"{folder} ({error.strerror})"
    return SpecError([FieldError("--runs-dir", got, "a folder to write to", "choose another folder")])


def _move_aside(folder: Path) -> Path:
    os.close(_lock(folder))
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    free = next(name for name in names if not name.exists())
    folder.rename(free)
    return free


def _lock(folder: Path) -> int:
    """Lock a folder through a file descriptor that outlives `exec`."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    os.set_inheritable(descriptor, True)
    return descriptor
