"""The `nccl` transport: vLLM's packed NCCL broadcast, with a record of what arrived.

The group is built from an NCCL unique id that the sender makes, so no port is chosen by anybody. NCCL itself never
gives up: nobody builds before all have met, and on both ends somebody watches, and aborts the communicator of an update
that cannot end any more.
"""

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from threading import Event, Lock
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
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

from rlhf_runtime.errors import ConnectionLostError
from rlhf_runtime.weight_sync.client import GRACE_SECONDS, EngineCall, EngineClient, background
from rlhf_runtime.weight_sync.meeting import POLL_SECONDS, Meeting, group_rank, join_engines, lost
from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_nccl"
BUFFERS = 2
"""One is filled or loaded while the other is on its way."""


@dataclass(kw_only=True)
class NCCLMeetingInfo(NCCLWeightTransferInitInfo):
    """Where sender and engines meet before they build the group, and how the weights come."""

    host: str
    port: int


class Abortable:
    """Either end of a group, which may be left while another thread works with it."""

    model_update_group: PyNcclCommunicator | None
    _meeting: Meeting | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._leaving = Lock()

    def shutdown(self) -> None:
        """Leave the group: others that wait for this process leave too, and a broadcast that hangs here ends."""
        if self._meeting is not None:
            self._meeting.leave()
        with self._leaving:
            group, self.model_update_group = self.model_update_group, None
        if group is not None and not group.disabled:
            # First, as whoever is at a broadcast must not start another on what is being freed.
            group.disabled = True
            background(partial(_abort, group))


def _abort(group: PyNcclCommunicator) -> None:
    """Free a communicator, which waits for what runs on its device."""
    with torch.accelerator.device_index(group.device.index):
        group.nccl.ncclCommAbort(group.comm)


class WatchedNCCLWeightTransferEngine(Abortable, NCCLWeightTransferEngine):
    """The engine's side, which leaves a handshake or an update that cannot end any more."""

    init_info_cls = NCCLMeetingInfo
    timeout_seconds: float
    """How long an update may take; `RecordedReceive` reads it from the handshake."""

    def init_transfer_engine(self, init_info: NCCLMeetingInfo) -> None:
        """Join the sender's group.

        Raises:
            ConnectionLostError: when not all of the group came.
        """
        self.packed = init_info.packed
        self.packed_buffer_size_bytes = init_info.packed_buffer_size_bytes
        self.packed_num_buffers = init_info.packed_num_buffers
        size, unique_id = init_info.world_size, init_info.nccl_unique_id_bytes
        # First, so that whatever fails after it is told to the others.
        self._meeting = Meeting.find(init_info.host, init_info.port, size, self.timeout_seconds)
        rank = group_rank(self.parallel_config, init_info.rank_offset)
        # Asked here: another thread begins on the first device.
        device = torch.accelerator.current_device_index()
        self.model_update_group = self._meeting.join(lambda _: uid_init_process_group(unique_id, rank, size, device))

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive and load every bucket.

        Raises:
            ConnectionLostError: when the sender or another receiver left, or was late; the group is gone then.
        """
        ended = Event()
        watching = background(partial(self._watch, ended))
        try:
            super().receive_weights(update_info)
        finally:
            ended.set()
            # Once the watch has taken the group away, what follows from it says nothing.
            watching.result()

    def _watch(self, ended: Event) -> None:
        """Leave, unless the update ends in time and with everyone there."""
        deadline = time.monotonic() + self.timeout_seconds
        try:
            while not ended.wait(POLL_SECONDS):
                self._meeting.require_everyone()
                if time.monotonic() > deadline:
                    raise lost(f"no end of the weights within {self.timeout_seconds:g} s")
        except ConnectionLostError:
            self.shutdown()
            raise


class RecordedNCCLWeightTransferEngine(RecordedReceive, WatchedNCCLWeightTransferEngine):
    """The engine's side, with a record of what arrived."""


@dataclass
class NCCLSenderInitInfo(TrainerInitInfo):
    """The trainer's settings."""

    backend: ClassVar[str] = BACKEND
    bucket_bytes: int
    """Bytes of the buffers together; vLLM closes a bucket after it is full, so that a large tensor may exceed them."""
    host: str
    """This node's address, as the engines reach it."""


class NCCLSender(Abortable, NCCLTrainerWeightTransferEngine):
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
            engine._join(init_info.host, packing)
        return engine

    def _join(self, host: str, packing: dict[str, Any]) -> None:
        size, device = self.client.world_size, torch.accelerator.current_device_index()
        unique_id = bytes(NCCLLibrary().ncclGetUniqueId())
        meeting = self._meeting = Meeting.open(host, size, self.client.timeout_seconds)
        info = NCCLMeetingInfo(
            host=host,
            port=meeting.port,
            rank_offset=1,
            world_size=size,
            nccl_unique_id_b64=base64.b64encode(unique_id).decode(),
            **packing,
        )
        joining = self.client.begin_init(worker_init_payload(info))
        build = partial(uid_init_process_group, unique_id, 0, size, device)
        self.model_update_group = join_engines(meeting, joining, lambda: meeting.join(lambda _: build()))

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
            own = self.model_update_group is not None
            self.shutdown()
            # Engines that wait for more leave now, and say so.
            with suppress(TimeoutError):
                cause = watching.exception(GRACE_SECONDS)
                # What follows here from an engine's failure says nothing, and what follows there from one here neither.
                if cause and not (own and isinstance(cause, ConnectionLostError)):
                    raise cause from error
            raise
        watching.result()


WeightTransferEngineFactory.register_engine(BACKEND, RecordedNCCLWeightTransferEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, NCCLSender)
