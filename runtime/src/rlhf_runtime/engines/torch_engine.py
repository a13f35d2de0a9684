"""Training and scoring with torch: FSDP2, AdamW, micro-batches by a token budget.

    sequences -> micro-batches -> packed [1, T] -> backbone [1, T, H] -> response positions [N, H] -> head -> [N]

Nothing is padded: the rows of a micro-batch stand one after the other, positions count from 0 in each, and attention
keeps them apart, so that a row's result does not depend on its neighbours. Results are flat over all response tokens in
row order. One path serves any world size and device.

Parameters, gradients and the optimizer's state are float32. In bfloat16 each layer's parameters are cast as they are
gathered; log-probabilities, values and losses stay float32.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rlhf_api.training import DType, Optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from rlhf_runtime.algorithms.losses import score_tokens
from rlhf_runtime.checkpoint.shards import ShardReader, State
from rlhf_runtime.engines import training_state
from rlhf_runtime.engines.attention import PACKED
from rlhf_runtime.engines.optimizer import Step, Stepper
from rlhf_runtime.engines.sequences import BLANK, ModelInput, Sequences
from rlhf_runtime.engines.training_state import own_tensors
from rlhf_runtime.errors import InputError
from rlhf_runtime.hugging_face import Trained
from rlhf_runtime.memory import enough_memory
from rlhf_runtime.model_writer import write_model
from rlhf_runtime.weight_sync.verify import checksum

PREFIX = "network."
"""What the engine puts before the names that Hugging Face gives to a model's parameters."""

ENOUGH_MEMORY = enough_memory(
    "training",
    "lower training.microBatchTokens, set training.activationCheckpointing, give the group more workers, or lower "
    "rollout.gpuMemoryUtilization where engines share the GPU",
)
"""Around what computes on the GPU."""

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
            attn_implementation=PACKED,
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
    _check_packing(model.eval(), folder)
    return model


@torch.no_grad()
def _check_packing(model: PreTrainedModel, folder: Path) -> None:
    """Refuse a model whose rows see each other when they are packed, as in recurrent layers."""
    tokens = torch.arange(min(8, model.config.get_text_config().vocab_size))
    rows = Sequences([tokens, tokens.flip(0)], [tokens[:1], tokens[:1]])
    fix = "Fix: choose another model"
    try:
        alone = model.base_model(input_ids=torch.stack(list(rows.prompts)), use_cache=False).last_hidden_state
    except ValueError as error:
        got = f"a {model.config.model_type} model with {error}"
        raise InputError(f"{folder}: got {got}; expected attention without. {fix}") from error
    alone = alone.flatten(0, 1)
    near = 1e-4 * alone.nan_to_num().abs().max().item()  # NaN is told by another check
    if not torch.allclose(_hidden(model, rows.model_input([0, 1])), alone, rtol=1e-3, atol=near, equal_nan=True):
        raise InputError(
            f"{folder}: got a {model.config.model_type} model, which computes rows that stand in one line not as it "
            f"does alone; expected one that mixes tokens by attention which transformers can replace. {fix}"
        )


def _hidden(model: PreTrainedModel, batch: ModelInput) -> torch.Tensor:
    """Last hidden states [T, H] of a micro-batch."""
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "packing": batch.packing}
    states: torch.Tensor = model.base_model(**inputs, use_cache=False).last_hidden_state
    return states.squeeze(0)


class PolicyModel(nn.Module):
    """A causal language model that scores response tokens."""

    outputs = 2

    def __init__(self, folder: Path, temperature: float, entropy_gradient: bool) -> None:
        super().__init__()
        self.network = _load(AutoModelForCausalLM, folder)
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient
        self._check_head(folder)

    def forward(self, batch: ModelInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [n] of a micro-batch's response tokens, and entropies [n], float32."""
        return score_tokens(self._logits(batch), batch.targets, self.temperature, self.entropy_gradient)

    def _logits(self, batch: ModelInput) -> torch.Tensor:
        """Logits [n, V] where response tokens are predicted: those of prompts would be much of the memory."""
        logits: torch.Tensor = self.network.get_output_embeddings()(_hidden(self.network, batch)[batch.places])
        return logits

    @torch.no_grad()
    def _check_head(self, folder: Path) -> None:
        """Refuse a model whose logits are not finite, or not those of its output layer, such as capped ones."""
        tokens = torch.arange(min(8, self.network.config.get_text_config().vocab_size))
        own = self.network(input_ids=tokens[None]).logits[0]
        if not own.isfinite().all():
            raise InputError(
                f"{folder}: got logits that are not finite; expected weights without NaN or Inf. "
                "Fix: copy the weights again, or choose another model"
            )
        line = Sequences([tokens[:1]], [tokens.roll(-1)])  # after each token one is predicted
        if not torch.allclose(self._logits(line.model_input([0])), own, rtol=1e-3, atol=1e-3):
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

    def forward(self, batch: ModelInput) -> tuple[torch.Tensor]:
        """Values [n] before each of a micro-batch's response tokens, float32."""
        values = self.value_head(_hidden(self.network, batch)[batch.places])
        return (values.float().sum(-1),)  # a view, such as squeeze gives, irks FSDP


class TorchEngine:
    """One model, sharded over all ranks of the default process group.

    All ranks call the same methods in the same order; each brings sequences of its own, any number of them.

    Args:
        folder: The Hugging Face folder of a causal language model.
        head: `lm` scores response tokens, `value` puts a value on each.
        device: What to compute on.
        micro_batch_tokens: Most tokens of one forward pass; one row is always let through.
        optimizer: None for a model that is never trained.
        temperature: Divides the logits.
        entropy_gradient: Whether the loss looks at entropies.
        dtype: What layers compute in.
        recompute: Whether the backward pass computes each layer anew, and not what it needs of it is kept.

    Raises:
        InputError: when the folder holds no such model.
        ResourceError: from here, `score` and `train_step`, when a GPU's memory does not suffice.
    """

    @ENOUGH_MEMORY
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
        dtype: DType = "float32",
        recompute: bool = False,
    ) -> None:
        self.folder = folder
        self.device = device
        self.micro_batch_tokens = micro_batch_tokens
        model = PolicyModel(folder, temperature, entropy_gradient) if head == "lm" else ValueModel(folder)
        model.eval().requires_grad_(optimizer is not None)  # eval: no dropout, so that a ratio starts at 1
        self.module = shard(model, device, dtype, recompute and optimizer is not None)
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

    @ENOUGH_MEMORY
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

    @ENOUGH_MEMORY
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

    def export(self, folder: Path, trained: Trained) -> None:
        """Write the model as a Hugging Face folder: config, safetensors, the tokenizer's files. All ranks call it.

        The folder appears once it is complete, in place of one that was there. Rank 0 writes it, which may take longer
        than ranks may wait for each other: the others return at once.

        Raises:
            CheckpointError: on rank 0, when it cannot be written.
        """
        weights = {}
        for name, tensor in own_tensors(self.network):
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if dist.get_rank() == 0:
                weights[name] = [full.detach().cpu()]
        if dist.get_rank() == 0:
            write_model(self.network, weights, self.folder, folder, trained)

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
        return self.module(inputs)


def shard(model: nn.Module, device: torch.device, dtype: DType = "float32", recompute: bool = False) -> FSDPModule:
    """Shard a model over all ranks of the default process group: each decoder layer by itself, the rest together.

    Args:
        model: Its parameters are float32, and stay so.
        device: Of this rank.
        dtype: What it computes in; gradients are summed over ranks in float32.
        recompute: Whether layers are computed anew in the backward pass.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    precision = mixed if dtype == "bfloat16" else MixedPrecisionPolicy()
    layers = set(model.network._no_split_modules or ())
    for layer in [module for module in model.modules() if type(module).__name__ in layers]:
        if recompute:  # inside of FSDP's hooks, which have the layer's parameters whole by then
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)
