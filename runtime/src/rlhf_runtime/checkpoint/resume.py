"""Whether a run goes on from a checkpoint."""

from pathlib import Path

from rlhf_api.checkpoint import Checkpoint as Settings

from rlhf_runtime.checkpoint.store import CheckpointStore, Found
from rlhf_runtime.errors import InputError


def find_checkpoint(settings: Settings | None) -> Found:
    """What to go on from, which is nothing for a run that starts anew. Changes nothing.

    Raises:
        InputError: when there are checkpoints and none may be gone on from: nothing is ever written over them.
    """
    if settings is None:
        return Found()
    store = CheckpointStore(Path(settings.path), settings.keep)
    found = store.find()
    if found.checkpoint and not settings.resume:
        raise InputError(
            f"checkpoint.path: got {store.folder}, which holds checkpoints up to step {found.step}; expected none, as "
            f"this run starts anew. Fix: use `rlhf run --resume` or `resume: true`, or choose another path"
        )
    if found.damaged and not found.checkpoint:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in found.damaged)
        raise InputError(
            f"checkpoint.path: got {store.folder} with damaged checkpoints alone ({reasons}); expected a whole one. "
            f"Fix: bring back a copy, or remove them to start anew"
        )
    return found
