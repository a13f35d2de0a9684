"""AdamW over sharded parameters, with linear warm-up and clipping by the global gradient norm."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rlhf_api.training import Optimizer
from torch import nn
from torch.distributed.tensor import DTensor

from rlhf_runtime.errors import NumericalError


@dataclass(frozen=True)
class Step:
    """What one optimizer step did."""

    loss: float
    """The loss, over all ranks."""
    grad_norm: float
    """Global norm of the gradient, before it was clipped."""


class Stepper:
    """The optimizer of one sharded module.

    Args:
        name: The model's, for errors.
        module: Every parameter is a DTensor sharded over all ranks.
        settings: The user's.
    """

    def __init__(self, name: str, module: nn.Module, settings: Optimizer) -> None:
        self.name = name
        self.settings = settings
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps = 0

    @property
    def learning_rate(self) -> float:
        """That of the latest step: step n of W warm-up steps has n / W of the learning rate."""
        return self.settings.learning_rate * min(1.0, self.steps / max(self.settings.warmup_steps, 1))

    def step(self, loss: torch.Tensor) -> Step:
        """Clip the accumulated gradient, step, and forget the gradient. All ranks call it.

        Args:
            loss: Scalar, this rank's share of the loss.

        Raises:
            NumericalError: on all ranks, the weights untouched, when loss or gradient is not finite.
        """
        shards = [_local(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        totals = torch.stack([loss, torch.nn.utils.get_total_norm(shards).square()])
        dist.all_reduce(totals)
        total_loss, square = totals.tolist()
        norm = math.sqrt(square) if square >= 0 else square
        if not math.isfinite(total_loss) or not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise NumericalError(
                f"{self.name}, optimizer step {self.steps + 1}: got loss {total_loss} and gradient norm {norm}; "
                f"expected finite numbers. Fix: lower the learning rate, or look for rewards that are not finite"
            )
        scale = self.settings.max_grad_norm / (norm + 1e-6)
        if scale < 1:
            torch._foreach_mul_(shards, scale)
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(total_loss, norm)


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's shard, as the tensor that it is: arithmetic on DTensors costs more than the numbers do."""
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
