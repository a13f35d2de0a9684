"""The `nccl` transport: vLLM's packed NCCL broadcast, with a record of what arrived.

The group meets by an NCCL unique id that the sender makes, so no port is chosen by anybody. NCCL itself never gives up:
on both ends somebody watches, and aborts the communicator of an update that cannot end any more.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Timer
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_common import (
    NCCLWeightTransferInitInfo,
    uid_init_process_group,
    worker_init_payload,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from rlhf_runtime.weight_sync.client import EngineCall, EngineClient, background, root_cause
from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_nccl"
BUFFERS = 2
"""One is filled or loaded while the other is on its way."""


class WatchedNCCLWeightTransferEngine(NCCLWeightTransferEngine):
    """The engine's side, which leaves an update that takes too long."""

    timeout_seconds: float
    """How long an update may take; `RecordedReceive` reads it from the handshake."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load every bucket.

        Raises:
            RuntimeError: when the sender was late; the group is gone then.
        """
        watch = Timer(self.timeout_seconds, self.shutdown)
        watch.daemon = True
        watch.start()
        try:
            super().receive_weights(update_info)
        finally:
            watch.cancel()
        if self.model_update_group is None:
            raise RuntimeError(f"no end of the weights within {self.timeout_seconds:g} s")


class RecordedNCCLWeightTransferEngine(RecordedReceive, WatchedNCCLWeightTransferEngine):
    """The engine's side, with a record of what arrived."""


@dataclass
class NCCLSenderInitInfo(TrainerInitInfo):
    """The trainer's settings."""

    backend: ClassVar[str] = BACKEND
    bucket_bytes: int
    """Bytes of the buffers together; vLLM closes a bucket after it is full, so that a large tensor may exceed them."""


class NCCLSender(NCCLTrainerWeightTransferEngine):
    """The trainer's side."""

    init_info_cls = NCCLSenderInitInfo
    client: EngineClient

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: WeightSource | None = None) -> Self:
        """Make the group's id and meet every worker of every engine.

        Raises:
            WeightSyncError: as an engine raised it, or when not all came in time.
        """
        size = max(1, init_info.bucket_bytes // BUFFERS)
        packing = {"packed": True, "packed_buffer_size_bytes": size, "packed_num_buffers": BUFFERS}
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, **packing)
        if engine.is_sender:
            unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
            device = torch.accelerator.current_device_index()
            joining = client.begin_init(worker_init_info(unique_id, client.world_size, packing))
            # NCCL has no end of waiting: beside this thread, and not waited for where an engine fails or is late.
            meeting = background(lambda: uid_init_process_group(unique_id, 0, client.world_size, device))
            joining.wait()
            engine.model_update_group = meeting.result()
        return engine

    def send_weights(self) -> None:
        """Broadcast every tensor; all ranks call it, since gathering is collective.

        Raises:
            WeightSyncError: as an engine raised it, or when it was late.
        """
        meta = self.source.metadata()
        if not self.is_sender:
            self._broadcast(self.source, meta)
            self._post_send_sync()
            return
        info = NCCLWeightTransferUpdateInfo(
            names=[tensor.name for tensor in meta],
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in meta],
            shapes=[list(tensor.shape) for tensor in meta],
        )
        self.client.start_weight_update()
        with self._watched(self.client.begin("update_weights", asdict(info))):
            self._broadcast(self.source, meta)
            self._post_send_sync()
        self.client.finish_weight_update()

    @contextmanager
    def _watched(self, update: EngineCall) -> Iterator[None]:
        """Abort the group as soon as an engine fails or is late, and raise what it said."""

        def watch() -> None:
            try:
                update.wait()
            except Exception:
                self.shutdown()
                raise

        watching = background(watch)
        try:
            yield
        except Exception as error:
            self.shutdown()
            # Once the group is gone this side fails too, in words that say nothing.
            known = [watching.exception()] if watching.done() else update.errors()
            raise (root_cause(cause for cause in known if isinstance(cause, Exception)) or error) from error
        watching.result()


def worker_init_info(unique_id: bytes, world_size: int, packing: dict[str, Any]) -> dict[str, Any]:
    """The handshake of the engine whose workers follow the sender; later engines have a larger `rank_offset`."""
    encoded = base64.b64encode(unique_id).decode()
    info = NCCLWeightTransferInitInfo(rank_offset=1, world_size=world_size, nccl_unique_id_b64=encoded, **packing)
    return worker_init_payload(info)


WeightTransferEngineFactory.register_engine(BACKEND, RecordedNCCLWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, NCCLSender)
