"""How a run ended, as its last line of output tells it: known when the driver and its endpoint are gone."""

import json
from typing import Any, Literal, Self

from pydantic import ValidationError

from rlhf_api.base import ApiModel
from rlhf_api.status import Progress

EndReason = Literal[
    "Completed",
    "Unexpected",
    "BadInput",
    "RewardFailed",
    "NotFinite",
    "InfrastructureLost",
    "CheckpointFailed",
    "Interrupted",
]
"""What kind of end it was, in one word."""

END_REASONS: dict[int, EndReason] = {
    0: "Completed",
    1: "Unexpected",
    2: "BadInput",
    3: "RewardFailed",
    4: "NotFinite",
    5: "InfrastructureLost",
    6: "CheckpointFailed",
    130: "Interrupted",
    143: "Interrupted",
}
"""Exit code of the runtime -> reason."""

KEY = "end"
"""Where the end stands in the summary, which is the last line of a run's output."""


MESSAGE_LENGTH = 2000
"""Most characters of a message, each up to six bytes of JSON, so that 16 KiB of a log hold the whole line."""


class RunEnd(ApiModel):
    """The end of a run."""

    exit_code: int
    """Status of the process."""
    reason: EndReason
    """Its kind."""
    message: str
    """What went wrong, as standard error has it, or the start of that; empty if nothing did."""
    progress: Progress | None = None
    """How far the run got, where it got to a start."""

    @classmethod
    def of(cls, exit_code: int, message: str = "") -> Self:
        """The end that an exit code stands for; a message that is too long is cut."""
        reason = END_REASONS.get(exit_code, "Unexpected")
        return cls(exit_code=exit_code, reason=reason, message=message[:MESSAGE_LENGTH])

    def line(self, summary: dict[str, Any]) -> str:
        """The last line of output: a run's summary, plain JSON values by name, with its end."""
        return json.dumps({**summary, KEY: self.model_dump(by_alias=True, exclude_none=True)}, allow_nan=False)

    @classmethod
    def last_of(cls, log: str) -> Self | None:
        """The end that a log tells in its last lines; None where the process was killed before it could.

        Lines after it, such as those of a supervisor, are let through.
        """
        for line in reversed(log.splitlines()):
            if line.startswith("{"):
                try:
                    return cls.model_validate(json.loads(line)[KEY], by_alias=True, by_name=False)
                except (ValueError, KeyError, ValidationError, RecursionError):
                    continue
        return None
