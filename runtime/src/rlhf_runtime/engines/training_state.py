"""The state of a sharded model in training: out as this rank's rows, in from the rows of any number of ranks."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlhf_runtime.checkpoint.shards import Shard, ShardReader
from rlhf_runtime.engines.optimizer import Stepper

MODEL = "model/"
"""What stands before the names of the model's own tensors; a state of the optimizer's has its own kind there."""


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer by name, a tied one once."""
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


@torch.no_grad()
def snapshot(module: FSDPModule, stepper: Stepper) -> dict[str, Shard]:
    """This rank's rows of the model and its optimizer's state, copied to the CPU. What all ranks hold, rank 0 gives."""
    module.reshard()
    shards = {}
    for name, tensor in own_tensors(module):
        shards[f"{MODEL}{name}"] = _shard_of(tensor)
    for name, parameter in module.named_parameters():
        for kind, state in stepper.optimizer.state[parameter].items():
            shards[f"{kind}/{name}"] = _shard_of(state)
    return {name: shard for name, shard in shards.items() if shard is not None}


@torch.no_grad()
def restore(module: FSDPModule, stepper: Stepper, reader: ShardReader) -> None:
    """Fill this rank's rows of the model, and make its optimizer's state anew.

    Raises:
        CheckpointError: naming the first tensor that is not there or has another shape.
    """
    module.reshard()
    kinds = {name.partition("/")[0] for name in reader.shapes} - {MODEL.removesuffix("/")}
    for name, tensor in own_tensors(module):
        _fill(tensor, reader, f"{MODEL}{name}")
    for name, parameter in module.named_parameters():
        stored = {kind: f"{kind}/{name}" for kind in sorted(kinds) if f"{kind}/{name}" in reader.shapes}
        stepper.optimizer.state[parameter] = {
            kind: _optimizer_state(parameter, reader, full) for kind, full in stored.items()
        }


def _optimizer_state(parameter: torch.Tensor, reader: ShardReader, name: str) -> torch.Tensor:
    """A state of a parameter: a number, or sharded as the parameter is."""
    if not reader.shapes[name]:
        return reader.read(name).to(parameter.device)
    state = torch.zeros_like(parameter)
    _fill(state, reader, name)
    return state


def _shard_of(tensor: torch.Tensor) -> Shard | None:
    if isinstance(tensor, DTensor):
        rows, first = tensor.to_local(), _first_row(tensor)
    elif dist.get_rank() == 0:
        rows, first = tensor, 0
    else:
        return None
    return Shard(rows.detach().to("cpu", copy=True).contiguous(), first, tuple(tensor.shape))


def _fill(tensor: torch.Tensor, reader: ShardReader, name: str) -> None:
    """Take the rows that a tensor has here."""
    if (shape := reader.shapes.get(name)) != tuple(tensor.shape):
        got = "no such tensor" if shape is None else f"one of {list(shape)}"
        raise reader.misfit(name, got, f"one of {list(tensor.shape)}")
    if isinstance(tensor, DTensor):
        rows = tensor.to_local()
        if rows.numel():  # of a tensor of fewer rows than ranks the last ones have none
            rows.copy_(reader.read(name, _first_row(tensor), len(rows)))
    else:
        tensor.copy_(reader.read(name))


def _first_row(tensor: DTensor) -> int:
    """The first row of this rank: FSDP cuts as `torch.chunk` does, in equal parts but for the last ones."""
    rows, ranks = tensor.shape[0], dist.get_world_size()
    return min(rows, dist.get_rank() * -(-rows // ranks))
