"""One sync of all engines, as the driver runs it."""

import logging
import time
from dataclasses import dataclass
from typing import Protocol

from rlhf_runtime.errors import RLHFError, WeightSyncError
from rlhf_runtime.weight_sync.verify import ReceivedWeights, SendReport, verify

logger = logging.getLogger(__name__)


class PolicyGroup(Protocol):
    """What a sync asks of the policy's worker group."""

    def send_weights(self, afresh: bool) -> list[SendReport]:
        """`WeightSender.send` on every rank; rank 0's report first."""


class RolloutGroup(Protocol):
    """What a sync asks of the rollout's worker group: one call to every engine, and a list of answers."""

    def pause(self) -> list[None]:
        """Refuse to generate from now on."""

    def publish_weights(self, version: int) -> list[None]:
        """Name the weights that were received and forget what was computed with older ones."""

    def received_weights(self) -> list[list[ReceivedWeights]]:
        """The records of each engine, one a worker of it."""

    def resume(self) -> list[None]:
        """Generate again."""


@dataclass(frozen=True)
class SyncReport:
    """What a sync moved."""

    version: int
    """Version that every engine holds now."""
    bytes: int
    """Bytes of the weights, as one engine received them."""
    seconds: float
    """Wall-clock time."""


def sync_weights(policy: PolicyGroup, rollout: RolloutGroup, version: int) -> SyncReport:
    """Bring the policy's weights to every engine.

        1. pause     engines refuse to generate
        2. send      policy rank 0 fills buckets, engines load them
        3. compare   what arrived is what was sent, and no parameter was left out
        4. publish   engines take the version and reset their prefix cache
        5. resume

    Steps 2 to 4 are repeated once, in full and over a new connection, when weights did not arrive as they were sent.

    Args:
        policy: The policy's worker group.
        rollout: The rollout's worker group.
        version: Version that the weights get.

    Raises:
        WeightSyncError: when a step failed again, or in a way that no repetition mends; the engines stay paused.
        RLHFError: of another kind, when a worker is gone.
    """
    start = time.monotonic()
    try:
        rollout.pause()
        try:
            sent = _send(policy, rollout, version, afresh=False)
        except WeightSyncError as error:
            logger.warning("Weight sync to version %d failed and is repeated in full: %s", version, error)
            sent = _send(policy, rollout, version, afresh=True)
        rollout.resume()
    except RLHFError:
        raise
    except Exception as error:
        raise WeightSyncError(
            f"weightSync: got {type(error).__name__} ({error}); expected version {version} on every engine. "
            "Fix: see the engine's own message above, then start the job again"
        ) from error
    return SyncReport(version, sent.bytes, time.monotonic() - start)


def _send(policy: PolicyGroup, rollout: RolloutGroup, version: int, afresh: bool) -> SendReport:
    sent = policy.send_weights(afresh)[0]
    for engine, records in enumerate(rollout.received_weights()):
        for rank, record in enumerate(records):
            verify(sent.checksums, record, f"engine {engine}, rank {rank}")
    rollout.publish_weights(version)
    return sent
