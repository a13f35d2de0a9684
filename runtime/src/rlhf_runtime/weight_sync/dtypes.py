"""What weights travel as: the engine's own dtype, so that no byte is moved that the engine would drop."""

import torch
from rlhf_api.runtime_config import Transport

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
