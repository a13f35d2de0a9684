"""What was seen of faults, and the page that is made of it by `python e2e/reliability.py`."""

import json
import subprocess
import textwrap
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from faults import EVICTION_SECONDS, PATIENCE_SECONDS

ORDER = (
    *("head pod killed", "policy worker pod killed", "rollout pod killed", "driver killed"),
    *("operator killed during training", "operator killed during apply", "two operators by mistake"),
    *("out of memory", "API server restarted", "job API unreachable for 30 s", "job API unreachable for ever"),
    *("node cordoned and drained", "kubelet stopped", "image that does not exist", "init container that fails"),
    *("checkpoint volume full", "checkpoint volume read-only", "job deleted during a step", "namespace deleted"),
    "suspended in each phase",
)
"""What is to be done to jobs, in the order of the page."""
ROOT = Path(__file__).parents[1]
SEEN = ROOT / "build" / "e2e" / "faults.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
INTRODUCTION = f"""# What was done to jobs, and what they did

Each fault was injected into real pods on kind with KubeRay and two cores: most of them while
examples/02-disaggregated.yaml trained with a checkpoint every 4 steps. `make e2e-faults` does all of it again;
`python e2e/reliability.py` makes this page of what it saw. The time goes from the fault to the outcome;
`-` means that the job had nothing to recover from.

For "job API unreachable for ever" the operator's setting `jobApiPatienceSeconds` was {PATIENCE_SECONDS}, and is 300 by
default. The job of "kubelet stopped" ended before Kubernetes evicts the pods of a lost node, which it does after
{EVICTION_SECONDS} s.

"""
HEAD = "| fault | what the job's status says | outcome | after | steps repeated | seen at |"


def record(fault: str, told: str, outcome: str, seconds: float | None, repeated: int = 0) -> None:
    """Keeps what a fault did to a job.

    Args:
        fault: What was done.
        told: What the job's status said of it.
        outcome: What came of it.
        seconds: From the fault until that; None where the job did not notice.
        repeated: Steps that were trained twice.
    """
    if fault not in ORDER:
        raise ValueError(f"got the fault {fault!r}; expected one of reliability.ORDER")
    after = None if seconds is None else round(seconds)
    row = {"fault": fault, "told": told, "outcome": outcome, "seconds": after, "repeated": repeated}
    SEEN.parent.mkdir(parents=True, exist_ok=True)
    with SEEN.open("a") as file:
        file.write(json.dumps(row | {"seen": f"{commit()}, {datetime.now(UTC):%Y-%m-%d}"}) + "\n")


@cache
def commit() -> str:
    """The commit that is tested, as it was at the session's first record; with `-dirty` where files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page() -> str:
    """The page: of each fault the newest record, or that there is none."""
    lines = SEEN.read_text().splitlines() if SEEN.exists() else []
    seen = {row["fault"]: row for row in map(json.loads, lines)}
    rows = [_row(fault, seen.get(fault)) for fault in ORDER]
    return "\n".join([INTRODUCTION + HEAD, "|" + " --- |" * 6, *rows]) + "\n"


def _row(fault: str, row: dict[str, Any] | None) -> str:
    if row is None:
        return f"| {fault} | not run | | | | |"
    told = textwrap.shorten(row["told"].replace("|", "\\|"), 200, placeholder=" ...")
    after = "-" if row["seconds"] is None else f"{row['seconds']} s"
    return f"| {fault} | {told} | {row['outcome']} | {after} | {row['repeated']} | {row['seen']} |"


if __name__ == "__main__":
    PAGE.write_text(page())
