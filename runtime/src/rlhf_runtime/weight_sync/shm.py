"""The `shm` transport: CUDA IPC's twin on CPU, registered with vLLM's weight-transfer factories.

The sending rank makes one buffer in shared memory for the life of the job. Engines map it in the handshake, after
which its name is removed: the memory lives as long as a process maps it, and nothing stays behind whatever ends the
processes. Each update writes tensors one after another into the buffer and tells the engines where they lie.
"""

import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from rlhf_runtime.weight_sync.buffer import FOLDER, aligned, create_buffer, map_buffer
from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_shm"


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where the buffer is."""

    path: str
    size: int
    """Bytes."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """What lies in the buffer, one entry a tensor."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Bytes from the buffer's start."""
    used: int = 0
    """Bytes of the buffer that are taken up."""

    def add(self, name: str, tensor: torch.Tensor) -> slice:
        """Append a tensor and return the bytes that are its place."""
        place = slice(self.used, self.used + tensor.numel() * tensor.element_size())
        self.names.append(name)
        self.dtype_names.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.offsets.append(place.start)
        self.used = aligned(place.stop)
        return place

    def tensors(self, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Views into the buffer's bytes [used]."""
        for name, dtype_name, shape, offset in zip(
            self.names, self.dtype_names, self.shapes, self.offsets, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            stop = offset + torch.Size(shape).numel() * dtype.itemsize
            yield name, data[offset:stop].view(dtype).view(shape)


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """The engine's side."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the buffer."""
        self._buffer = map_buffer(Path(init_info.path), init_info.size)

    def start_weight_update(self) -> None:
        """Put the model back into the form of its checkpoint."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        """Receive one bucket; the base class waits for an accelerator, which is not there."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Load what lies in the buffer."""
        # Copied: the loader keeps tensors until their layer is complete, and the next bucket overwrites these.
        data = self._buffer[: update_info.used].clone()
        self.model.load_weights(update_info.tensors(data))

    def finish_weight_update(self) -> None:
        """Bring the model into the form that it computes in."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Unmap the buffer."""
        self._buffer = torch.empty(0, dtype=torch.uint8)


class RecordedShmWeightTransferEngine(RecordedReceive, ShmWeightTransferEngine):
    """The engine's side, with a record of what arrived."""


@dataclass
class ShmTrainerInitInfo(TrainerInitInfo):
    """The trainer's settings."""

    backend: ClassVar[str] = BACKEND
    buffer_bytes: int
    """Size of the buffer; no tensor may be larger."""


class ShmTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmTrainerInitInfo]):
    """The trainer's side; only the sending rank has a buffer."""

    init_info_cls = ShmTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: ShmTrainerInitInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Make the buffer and have every engine map it.

        Raises:
            WeightSyncError: when shared memory is too small, or an engine is on another machine.
        """
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if engine.is_sender and source is not None:
            path = FOLDER / f"rlhf-{uuid.uuid4().hex}"
            size = init_info.buffer_bytes
            engine._buffer = create_buffer(path, size)
            try:
                client.init_weight_transfer_engine({"path": str(path), "size": size})
            finally:
                path.unlink()
        return engine

    def send_weights(self) -> None:
        """Send every tensor; all ranks call it, since gathering is collective."""
        source = self.source if self.source is not None else ()
        if not self.is_sender:
            for _ in source:
                pass
            return
        self.client.start_weight_update()
        bucket = ShmUpdateInfo()
        for name, tensor in source:
            size = tensor.numel() * tensor.element_size()
            if bucket.used + size > len(self._buffer):
                self.client.update_weights(asdict(bucket))
                bucket = ShmUpdateInfo()
            place = bucket.add(name, tensor)
            self._buffer[place].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self.client.update_weights(asdict(bucket))
        self.client.finish_weight_update()


WeightTransferEngineFactory.register_engine(BACKEND, RecordedShmWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, ShmTrainerWeightTransferEngine)
