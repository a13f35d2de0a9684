"""What a person does next about a job, by its status. Pure."""

from rlhf_api.status import RLHFJobStatus


def next_step(name: str, status: RLHFJobStatus) -> str:
    """One sentence with the command to type.

    Args:
        name: the job's name.
        status: its status; empty before the operator has seen it.
    """
    false = {condition.type for condition in status.conditions if condition.status == "False"}
    match status.phase:
        case None:
            return f"wait for the operator to look at it; if that lasts, does it run? `rlhf events {name}`."
        case "Succeeded":
            return f"the trained model is in the run folder; `rlhf delete {name}` removes the job."
        case "Failed" if "Accepted" in false:
            return f"mend the manifest as the message says, `rlhf delete {name}`, then `rlhf apply` it again."
        case "Failed":
            again = f"`rlhf delete {name}` and `rlhf apply` start it again, from {_start(status)}"
            more = f"`rlhf events {name}` says more, and `rlhf logs {name}` where its log is"
            return f"{more}; {again} where `checkpoint.resume` is set."
        case "Suspended":
            return f"`rlhf resume {name}` lets it go on from {_start(status)}."
        case "Training":
            return f"`rlhf logs -f {name}` follows the driver; `rlhf wait {name}` waits for the end."
        case "Restarting":
            return f"nothing: it goes on by itself from {_start(status)}; `rlhf logs {name}` has the last try's end."
        case _ if "Accepted" in false:
            return "mend the manifest as the message says, and `rlhf apply` it again."
        case _ if "PlacementFeasible" in false:
            return "add nodes as the message says, unless an autoscaler does; the job waits for them."
        case _:
            return f"wait; `rlhf events {name}` shows what its pods wait for."


def _start(status: RLHFJobStatus) -> str:
    found = status.progress.last_checkpoint if status.progress else None
    return found or "its newest checkpoint"
