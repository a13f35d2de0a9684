"""Who a worker is and what became of it, as messages tell it."""

from dataclasses import dataclass

from rlhf_runtime.errors import InfrastructureError


@dataclass(frozen=True)
class Member:
    """One worker as messages name it."""

    group: str
    rank: int
    node: str
    """Address of its node."""
    pid: int | None = None
    node_id: str = ""
    """Ray's id of its node."""
    roles: tuple[str, ...] = ()
    """The roles that share its process, where there are several."""

    def __str__(self) -> str:
        pid = "not started" if self.pid is None else f"pid {self.pid}"
        roles = f": {', '.join(self.roles)}" if self.roles else ""
        return f"group `{self.group}`, rank {self.rank} ({pid} on node {self.node}{roles})"


@dataclass(frozen=True)
class Verdict:
    """Why the run cannot go on."""

    member: Member | None
    """Whose fault it is; None where the monitor itself failed."""
    got: str
    """What was found, for people."""

    def error(self, detail: str = "") -> InfrastructureError:
        """The error that tells it.

        Args:
            detail: What else is known of it.
        """
        got = f"{self.got}; {detail}" if detail else self.got
        if self.member is None:
            return InfrastructureError(f"health monitor: got {got}; expected a watch over all workers. Fix: run again")
        return InfrastructureError(
            f"{self.member}: got {got}; expected an answer. Fix: look in the node's logs for what ended it, such as "
            f"memory running out"
        )
