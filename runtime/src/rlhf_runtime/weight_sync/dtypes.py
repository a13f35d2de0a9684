"""What weights travel as: the engine's own dtype, so that no byte is moved that the engine would drop."""

from collections.abc import Iterable

import torch
from rlhf_api.runtime_config import Transport

from rlhf_runtime.errors import InputError

ENGINE_DTYPES: dict[Transport, torch.dtype] = {
    "shm": torch.float32,
    "gloo": torch.float32,
    "ipc": torch.bfloat16,
    "nccl": torch.bfloat16,
}
"""Transport -> what the engines that it reaches compute in: float32 on a CPU, bfloat16 on a GPU."""


def wire_dtype(own: torch.dtype, engine: torch.dtype) -> torch.dtype:
    """What a parameter of dtype `own` travels as: as the engine computes, but integers as they are."""
    return engine if own.is_floating_point else own


def require_one_dtype(dtypes: Iterable[torch.dtype], transport: Transport) -> None:
    """Refuse a model that vLLM's packed transports cannot unpack: they leave no gap to align the next tensor.

    Args:
        dtypes: What its parameters travel as.
        transport: `ipc` or `nccl`.

    Raises:
        InputError: naming the dtypes, where there are several.
    """
    names = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})
    if len(names) > 1:
        raise InputError(
            f"models.policy: got parameters that travel as {' and '.join(names)}; expected one dtype, as `{transport}` "
            "packs them without gaps. Fix: choose a model without integer parameters"
        )
