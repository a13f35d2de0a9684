"""The policy worker's side of a sync."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rlhf_api.runtime_config import SyncPath
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine

from rlhf_runtime.errors import InfrastructureError
from rlhf_runtime.weight_sync.client import EngineClient
from rlhf_runtime.weight_sync.dtypes import ENGINE_DTYPES
from rlhf_runtime.weight_sync.source import RecordingSource
from rlhf_runtime.weight_sync.transports import connect
from rlhf_runtime.weight_sync.verify import SendReport


class WeightSender:
    """Sends a policy's weights to every engine, again and again.

    Every rank of the policy makes one and calls `send`, since gathering sharded tensors is collective; only rank 0
    speaks to the engines. It joins them in its first send, and anew after a send that failed.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        prefix: str,
        path: SyncPath,
        engines: Sequence[Any],
        rank: int,
        *,
        workers_per_engine: int,
        host: str,
    ) -> None:
        """Take the engines; nothing is sent yet.

        Args:
            module: The policy.
            prefix: Beginning of the module's parameter names that the checkpoint does not have.
            path: Transport, bucket size, verification and time-out.
            engines: Actor handles of the rollout engines.
            rank: This rank.
            workers_per_engine: Workers of each engine, its tensor-parallel size.
            host: Address of rank 0's node, as the engines reach it.
        """
        self._path, self._rank, self._host = path, rank, host
        self._client = EngineClient(engines, workers_per_engine, path.verify, path.timeout_seconds)
        dtype = ENGINE_DTYPES[path.transport]
        self._source = RecordingSource(module, prefix, dtype, checksums=path.verify and rank == 0)
        self._transfer: TrainerWeightTransferEngine | None = None

    def send(self, afresh: bool) -> SendReport:
        """Send every weight once and say what was sent.

        Args:
            afresh: Whether to join the engines anew before.

        Raises:
            WeightSyncError: when an engine could not take them, or not in time; another send may succeed.
            Exception: of another kind, when an engine is gone, or this rank failed by itself.
        """
        self._client.restart()
        self._source.rewind()
        if afresh:
            self.close()
        try:
            self._joined().send_weights()
        except Exception as error:
            self.close()
            self._release_ranks(error)
            raise
        return SendReport(dict(self._source.checksums), sum(self._source.sizes()))

    def close(self) -> None:
        """Leave the engines; those that wait for more fail."""
        if self._transfer is not None:
            self._transfer.shutdown()
            self._transfer = None

    def _joined(self) -> TrainerWeightTransferEngine:
        if self._transfer is None:
            if self._rank == 0:
                self._client.abandon_weight_update()
            self._transfer = connect(self._path, self._source, self._client, self._rank, self._host)
        return self._transfer

    def _release_ranks(self, error: Exception) -> None:
        """Gather on to the end, as the other ranks do.

        Raises:
            InfrastructureError: over `ipc`, where the other ranks wait for more than that, so that nothing can be
                repeated.
        """
        if self._path.transport == "ipc" and dist.is_initialized() and dist.get_world_size() > 1:
            raise InfrastructureError(str(error)) from error
        self._source.drain()
