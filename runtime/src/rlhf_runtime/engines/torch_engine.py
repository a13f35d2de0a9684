"""Training and scoring with torch: FSDP2, AdamW, micro-batches by a token budget.

    sequences -> micro-batches -> padded [B, L] -> backbone [B, L, H] -> response positions [N, H] -> head -> [N]

Sequences come without padding; it is made here, on the right and under causal attention, so that no token sees any and
each row's positions count from 0: a row's result does not depend on its neighbours. Results are flat over all response
tokens in row order. One path serves any world size and device.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rlhf_api.training import Optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from rlhf_runtime.algorithms.losses import score_tokens
from rlhf_runtime.checkpoint.shards import ShardReader, State
from rlhf_runtime.engines import training_state
from rlhf_runtime.engines.optimizer import Step, Stepper
from rlhf_runtime.engines.sequences import BLANK, Sequences
from rlhf_runtime.engines.training_state import own_tensors
from rlhf_runtime.errors import InputError
from rlhf_runtime.hugging_face import write_model
from rlhf_runtime.weight_sync.verify import checksum

PREFIX = "network."
"""What the engine puts before the names that Hugging Face gives to a model's parameters."""

Loss = Callable[[tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]
"""From a model's outputs [n] and those tokens' places [n] in the flat order of all response tokens, to a scalar."""


def _load(kind: type[AutoModel] | type[AutoModelForCausalLM], folder: Path) -> PreTrainedModel:
    """A float32 model with every one of its weights from the folder: transformers alone would make up missing ones.

    Raises:
        InputError: when the folder does not hold that.
    """
    hf_logging.disable_progress_bar()
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # it would warn of a head that a value model has no use for
    fix = "Fix: point the model's `path` at the folder of a causal language model as transformers writes it"
    try:
        model, report = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{folder}: got no model to load ({error}); expected config and safetensors. {fix}") from error
    finally:
        hf_logging.set_verbosity(verbosity)
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{folder}: got no weights for {', '.join(missing[:5])}; expected all of the model's. {fix}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        got = f"{len(mismatched)} weights of another shape than config.json's, such as {name} of {list(stored)}"
        raise InputError(f"{folder}: got {got}; expected {list(wanted)}. {fix}")
    return model


class PolicyModel(nn.Module):
    """A causal language model that scores response tokens."""

    outputs = 2

    def __init__(self, folder: Path, temperature: float, entropy_gradient: bool) -> None:
        super().__init__()
        self.network = _load(AutoModelForCausalLM, folder)
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self._check_head(folder)

    def forward(
        self, input_ids: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [N] of `targets` [N] after the places [N] of `input_ids` [B, L], and entropies [N]."""
        return score_tokens(self._logits(input_ids, places), targets, self.temperature, self.entropy_gradient)

    def _logits(self, input_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] at the places [N] alone: those of prompts and padding would be most of the memory."""
        hidden = self.network.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        logits: torch.Tensor = self.network.get_output_embeddings()(hidden.flatten(0, 1)[places])
        return logits

    @torch.no_grad()
    def _check_head(self, folder: Path) -> None:
        """Refuse a model whose logits are not finite, or not those of its output layer, such as capped ones."""
        tokens = torch.arange(min(8, self.network.config.get_text_config().vocab_size))
        own = self.network.eval()(input_ids=tokens[None]).logits[0]
        if not own.isfinite().all():
            raise InputError(
                f"{folder}: got logits that are not finite; expected weights without NaN or Inf. "
                "Fix: copy the weights again, or choose another model"
            )
        if not torch.allclose(self._logits(tokens[None], tokens), own, rtol=1e-3, atol=1e-3):
            raise InputError(
                f"{folder}: got a {self.network.config.model_type} model, which changes its logits after the output "
                "layer; expected one whose logits are those of the layer. Fix: choose another model"
            )


class ValueModel(nn.Module):
    """The backbone of a causal language model under a value head that starts at 0."""

    outputs = 1

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.network = _load(AutoModel, folder)
        self.value_head = nn.Linear(self.network.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: torch.Tensor, places: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor]:
        """Values [N] at the places [N] of `input_ids` [B, L]; the targets are not looked at."""
        hidden = self.network(input_ids=input_ids, use_cache=False).last_hidden_state
        return (self.value_head(hidden.flatten(0, 1)[places]).sum(-1),)  # a view, such as squeeze gives, irks FSDP


class TorchEngine:
    """One model, sharded over all ranks of the default process group.

    All ranks call the same methods in the same order; each brings sequences of its own, any number of them.

    Args:
        folder: The Hugging Face folder of a causal language model.
        head: `lm` scores response tokens, `value` puts a value on each.
        device: What to compute on.
        micro_batch_tokens: Most tokens, padding counted, of one forward pass; one row is always let through.
        optimizer: None for a model that is never trained.
        temperature: Divides the logits.
        entropy_gradient: Whether the loss looks at entropies.

    Raises:
        InputError: when the folder holds no such model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        head: Literal["lm", "value"],
        device: torch.device,
        micro_batch_tokens: int,
        optimizer: Optimizer | None = None,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
    ) -> None:
        self.folder = folder
        self.device = device
        self.micro_batch_tokens = micro_batch_tokens
        model = PolicyModel(folder, temperature, entropy_gradient) if head == "lm" else ValueModel(folder)
        model.eval().requires_grad_(optimizer is not None)  # eval: no dropout, so that a ratio starts at 1
        self.module = shard(model, device)
        self.stepper = (
            None if optimizer is None else Stepper("policy" if head == "lm" else "critic", self.module, optimizer)
        )

    @property
    def network(self) -> PreTrainedModel:
        """The Hugging Face model, its parameters sharded."""
        network = self.module.network
        assert isinstance(network, PreTrainedModel)
        return network

    @property
    def learning_rate(self) -> float:
        """The learning rate of the latest optimizer step."""
        return self.stepper.learning_rate if self.stepper else 0.0

    @torch.no_grad()
    def score(self, sequences: Sequences) -> tuple[torch.Tensor, ...]:
        """Outputs for all response tokens, each [N] float32 on the CPU in row order.

        `lm` gives log-probabilities and entropies, `value` gives values.
        """
        flat = tuple(torch.zeros(sequences.tokens) for _ in range(self.module.outputs))
        for rows in self._passes(sequences):
            outputs = self._forward(sequences, rows)
            if rows:
                places = sequences.flat_places(rows)
                for column, output in zip(flat, outputs, strict=True):
                    column[places] = output.cpu()
        self.module.reshard()  # the root keeps its parameters whole after a forward pass
        return flat

    def train_step(self, sequences: Sequences, loss: Loss) -> Step:
        """One optimizer step on the sum of a loss over the micro-batches of all ranks.

        Args:
            sequences: This rank's rows.
            loss: Called with each micro-batch; the sum of what it gives, on all ranks, is minimised. So it divides by
                the token count of all ranks, not by its own.

        Raises:
            NumericalError: on all ranks, the weights untouched, when loss or gradient is not finite.
        """
        assert self.stepper is not None, "the engine was built without an optimizer"
        return self.stepper.step(self.accumulate(sequences, loss))

    def accumulate(self, sequences: Sequences, loss: Loss) -> torch.Tensor:
        """Add the gradient of `train_step`'s loss, and give this rank's share of its value, a scalar."""
        total = torch.zeros((), device=self.device)
        for rows in self._passes(sequences):
            outputs = self._forward(sequences, rows)
            value = loss(outputs, sequences.flat_places(rows)) if rows else outputs[0].sum() * 0.0
            (value * dist.get_world_size()).backward()  # FSDP averages gradients over ranks
            total += value.detach()
        return total

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder: config, safetensors, the tokenizer's files. All ranks call it.

        The folder appears once it is complete, in place of one that was there.
        """
        weights = {}
        for name, tensor in own_tensors(self.network):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if dist.get_rank() == 0:
                weights[name] = full.detach().cpu()
        if dist.get_rank() == 0:
            write_model(self.network, weights, self.folder, folder)
        dist.barrier()

    def state(self) -> State:
        """This rank's rows of the state of training, copied to the CPU."""
        assert self.stepper is not None, "the engine was built without an optimizer"
        return State(training_state.snapshot(self.module, self.stepper), {"optimizer_steps": self.stepper.steps})

    def restore(self, reader: ShardReader) -> None:
        """Go on from a saved state of training.

        Raises:
            CheckpointError: when it is not this model's.
        """
        assert self.stepper is not None, "the engine was built without an optimizer"
        training_state.restore(self.module, self.stepper, reader)
        self.stepper.steps = reader.notes[0]["optimizer_steps"]

    @torch.no_grad()
    def digests(self) -> dict[str, int]:
        """What all ranks have to agree on. All ranks call it.

        Returns:
            The checksum of each parameter, as this rank gathers it, one at a time, and of each buffer, by name; under
            `optimizer steps` how many there were.
        """
        found = {"optimizer steps": self.stepper.steps if self.stepper else 0}
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            found[name] = checksum(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        return found

    def _passes(self, sequences: Sequences) -> Iterator[list[int]]:
        """Rows of each forward pass; empty ones at the end, so that every rank makes as many collectives."""
        batches = sequences.micro_batches(self.micro_batch_tokens)
        most = torch.tensor(len(batches), device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        yield from batches
        yield from ([] for _ in range(int(most) - len(batches)))

    def _forward(self, sequences: Sequences, rows: list[int]) -> tuple[torch.Tensor, ...]:
        """The model's outputs [n] for the response tokens of some rows."""
        inputs = (sequences.model_input(rows) if rows else BLANK.model_input([0])).to(self.device)
        return self.module(inputs.input_ids, inputs.places, inputs.targets)


def shard(model: nn.Module, device: torch.device) -> FSDPModule:
    """Shard a model over all ranks of the default process group: each decoder layer by itself, the rest together."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = set(model.network._no_split_modules or ())
    for module in [module for module in model.modules() if type(module).__name__ in layers]:
        fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)
