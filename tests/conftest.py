import copy
from typing import Any

import pytest

GOOD: dict[str, Any] = {
    "apiVersion": "rlhf-operator.io/v1alpha1",
    "kind": "RLHFJob",
    "metadata": {"name": "job"},
    "spec": {
        "models": {"policy": {"random": {"architecture": "qwen2", "config": {"hidden_size": 64}}}},
        "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
        "data": {"prompts": {"builtin": "arithmetic"}},
        "algorithm": {"ppo": {}},
        "training": {"steps": 3},
        "nodePools": [{"name": "local"}],
    },
}


@pytest.fixture
def manifest() -> dict[str, Any]:
    """The smallest manifest, to be changed at will."""
    return copy.deepcopy(GOOD)
