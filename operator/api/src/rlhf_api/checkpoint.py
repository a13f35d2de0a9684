"""Where checkpoints go, how many there are, and whether a run goes on from them."""

from typing import Annotated, ClassVar

from pydantic import Field

from rlhf_api.base import ApiModel, PositiveInt

CHECKPOINT_FOLDERS = "step-[0-9]*[0-9]"
"""Pattern of the names of finished checkpoints inside their folder."""


class Checkpoint(ApiModel):
    """Checkpoints of all that a run needs to go on as if it had never stopped."""

    planned: ClassVar[frozenset[str]] = frozenset({"exportHuggingFace"})

    path: Annotated[str, Field(min_length=1)] = "checkpoints"
    """Their folder: relative to the run's, or absolute on a storage. It belongs to this job alone."""
    every_steps: PositiveInt = 20
    """Steps from one to the next; the last step of the job has one too."""
    keep: PositiveInt = 3
    """How many stay; older ones are removed once a newer one is complete."""
    resume: bool = False
    """Go on from the newest one that is whole where there are any, as `rlhf run --resume` does."""
