"""What every rendered object shares."""

from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]
"""A rendered Kubernetes object, or a part of one."""


@dataclass(frozen=True)
class Owner:
    """The RLHFJob that the rendered objects belong to."""

    uid: str
    """Its UID."""
    name: str
    """Its name."""
    namespace: str
    """Its namespace, and that of its objects."""
