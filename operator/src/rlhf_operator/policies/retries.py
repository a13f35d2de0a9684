"""What the end of a try means, whose limit it counts against, and when the next one may begin.

| exit code | end | what follows |
| --- | --- | --- |
| 0 | all steps are done | Succeeded |
| 2 | bad input | Failed at once: the same input ends the same way |
| 4 | numbers not finite | Failed at once: a resumed run computes the same numbers |
| 3, 6, 1, others | reward, checkpoint, anything else | next try, counted against `backoffLimit` |
| 5, 130, 143 | a worker or node was lost, the driver interrupted | next try, `infrastructureBackoffLimit` |
| -n | signal n | as 128 + n, which is how a shell tells it |
| none | Ray could not run the driver | next try, `infrastructureBackoffLimit` |

A driver that was stopped through Ray was stopped by a person: Failed at once.
"""

import signal
from dataclasses import dataclass
from datetime import datetime, timedelta

from rlhf_api.run_end import END_REASONS, RunEnd
from rlhf_api.status import FailureKind, Progress, RLHFJobStatus

from rlhf_operator.observe import DriverView, parse_time
from rlhf_operator.terms import Terms

FATAL = frozenset({2, 4})
"""Exit codes after which another try would end in the same way."""
INFRASTRUCTURE = frozenset({5, 130, 143})
"""Exit codes that are no fault of the program's."""
ENVIRONMENT_ERRORS = frozenset({"RUNTIME_ENV_SETUP_FAILURE", "JOB_ENTRYPOINT_COMMAND_START_ERROR"})
"""Ray's kinds of error that are the image's fault, though no driver ran."""
LONGEST = 30
"""Most times the first delay that a delay grows to."""
MESSAGE_LENGTH = 1000
"""Characters of a driver's message that are kept."""


@dataclass(frozen=True)
class End:
    """How a try ended."""

    kind: FailureKind | None
    """Whose fault it was; None for success."""
    reason: str
    message: str
    fatal: bool = False
    """Whether a next try is pointless."""
    progress: Progress | None = None
    """How far it got, by its own last word."""


def end_of(driver: DriverView) -> End | None:
    """How the current try ended; None while it has not."""
    if driver.state not in ("succeeded", "failed", "stopped"):
        return None
    told = RunEnd.last_of(driver.log)
    progress = told.progress if told else None
    if driver.state == "succeeded":
        return End(None, "Completed", "All steps are done.", progress=progress)
    if driver.state == "stopped":
        message = "The driver was stopped through Ray's job API."
        return End("Program", "DriverStopped", message, fatal=True, progress=progress)
    code = told.exit_code if told and told.exit_code else driver.exit_code
    code = 128 - code if code is not None and code < 0 else code
    message = (told.message if told and told.message else _killed(code) or driver.message)[:MESSAGE_LENGTH]
    if code is None:
        kind: FailureKind = "Program" if driver.error_type in ENVIRONMENT_ERRORS else "Infrastructure"
        return End(kind, "DriverNotRun", f"Ray could not run the driver: {message}")
    reason = END_REASONS.get(code, "Unexpected")
    kind = "Infrastructure" if code in INFRASTRUCTURE else "Program"
    return End(kind, reason, f"The driver ended with exit code {code}: {message}", code in FATAL, progress)


def _killed(code: int | None) -> str | None:
    """What the exit code of a process says that had no last word; None where it was not a signal that ended it."""
    if code is None or code <= 128 or code - 128 not in set(signal.Signals):
        return None
    name = signal.Signals(code - 128).name
    return f"it was ended by {name}" + (", as by the kernel when memory runs out" if name == "SIGKILL" else "")


def exhausted(terms: Terms, status: RLHFJobStatus) -> str | None:
    """Why there is no next try: the limit that its failures have passed, in words; None if there is one."""
    counts = (
        (status.program_failures or 0, terms.backoff_limit, "backoffLimit"),
        (status.infrastructure_failures or 0, terms.infrastructure_backoff_limit, "infrastructureBackoffLimit"),
    )
    for failures, limit, name in counts:
        if failures > limit:
            return f"{failures} failures are more than the {name} of {limit}"
    return None


def not_before(status: RLHFJobStatus, first_delay_seconds: float) -> datetime | None:
    """When the next try may begin: the delay doubles with every failure; None without one."""
    if not status.failures:
        return None
    count = (status.program_failures or 0) + (status.infrastructure_failures or 0)
    factor = min(2 ** min(max(count - 1, 0), 10), LONGEST)
    return parse_time(status.failures[-1].time) + timedelta(seconds=first_delay_seconds * factor)
