"""Ways for a run to end badly, each with its exit code.

The code tells an operator whether another try could help: 2 to 4 are the user's to mend, 5 is the cluster's, 6 the
storage's.
"""


class RLHFError(Exception):
    """A failure that is told to the user by its message alone."""

    exit_code = 1
    """Status that the process ends with."""


class InputError(RLHFError):
    """A model, data set or reward function that cannot be used; the message reads `path: got X; expected Y. Fix: Z`."""

    exit_code = 2


class ResourceError(RLHFError):
    """A GPU's memory did not suffice, or an engine did not start: another try may find the machine otherwise."""


class RewardError(RLHFError):
    """A reward function raised, or a reward is not one finite number a response, or tells too few of them apart."""

    exit_code = 3


class NumericalError(RLHFError):
    """A loss, gradient or log-probability is not finite."""

    exit_code = 4


class InfrastructureError(RLHFError):
    """A worker, node or placement group was lost or could not be had, or weights did not arrive."""

    exit_code = 5


class CheckpointError(RLHFError):
    """A checkpoint, or what is reported beside it, could not be written; or it does not fit what is to be restored."""

    exit_code = 6


class DesyncError(InfrastructureError):
    """Ranks of a role do not hold the same numbers any more."""


class PlacementError(InfrastructureError):
    """The cluster cannot hold the placement groups."""


class WeightSyncError(InfrastructureError):
    """An engine does not hold the weights that were sent to it."""


class ConnectionLostError(WeightSyncError):
    """The other end of a sync is gone, late, or closed the connection since something failed there."""
