"""The state of every random generator of a process, as JSON.

The engines draw from none of them, since each sample has a seed of its own; reward functions and libraries may.
"""

import base64
import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The generators of Python, NumPy and torch, the current GPU's where there is one."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [kind, keys.tolist(), position, has_gauss, cached],
        "torch": _encoded(torch.get_rng_state()),
    }
    return state | ({"cuda": _encoded(torch.cuda.get_rng_state())} if torch.cuda.is_available() else {})


def restore(state: dict[str, Any]) -> None:
    """Put every generator back into a captured state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_decoded(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decoded(state["cuda"]))


def _encoded(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decoded(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
