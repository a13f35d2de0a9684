"""The trainer's weights as a stream of named tensors that remembers what it handed out."""

from collections.abc import Iterator

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

from rlhf_runtime.weight_sync.dtypes import wire_dtype
from rlhf_runtime.weight_sync.verify import checksum


class RecordingSource(WeightSource):
    """`WeightSource` over a module, which FSDP2 may have sharded.

    Gathering a sharded tensor is a collective, so every rank iterates, one tensor at a time; what a rank does not keep
    is freed before the next is gathered. A parameter under two names (tied embeddings) is sent once, under the first.
    """

    def __init__(self, module: torch.nn.Module, prefix: str, dtype: torch.dtype, checksums: bool) -> None:
        """Wrap a module.

        Args:
            module: The policy.
            prefix: Beginning of parameter names that a checkpoint does not have, such as a wrapper's `model.`;
                parameters without it are not sent.
            dtype: What the engines compute in, and so what weights are cast to before anything else.
            checksums: Whether they are taken; the sending rank's are enough.
        """
        self._module, self._prefix, self._dtype, self._take = module, prefix, dtype, checksums
        self.checksums: dict[str, int | None] = {}
        self._pass: Iterator[tuple[str, torch.Tensor]] | None = None

    def metadata(self) -> list[ParamMeta]:
        """Names, dtypes that travel and full shapes, without gathering."""
        return [ParamMeta(name, self._wire(tensor), tuple(tensor.shape)) for name, tensor in self._parameters()]

    def sizes(self) -> list[int]:
        """Bytes of each tensor that travels."""
        return [tensor.numel() * self._wire(tensor).itemsize for _, tensor in self._parameters()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.checksums = {}
        self._pass = self._materialized()
        return self._pass

    def rewind(self) -> None:
        """Forget the last pass: a send begins."""
        self._pass = None

    def drain(self) -> None:
        """Gather what is left of this send's pass, all of it if it did not begin: the other ranks wait for that."""
        for _ in self._pass or self:
            pass

    def _materialized(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._parameters():
            tensor = materialize_full_tensor(parameter.detach().to(self._wire(parameter)))
            self.checksums[name] = checksum(tensor) if self._take else None
            yield name, tensor

    def _wire(self, parameter: torch.Tensor) -> torch.dtype:
        return wire_dtype(parameter.dtype, self._dtype)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            if name.startswith(self._prefix):
                yield name.removeprefix(self._prefix), parameter
