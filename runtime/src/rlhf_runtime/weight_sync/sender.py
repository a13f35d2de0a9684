"""The policy worker's side of a sync."""

from typing import Any

import torch
from rlhf_api.runtime_config import SyncPath
from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient

from rlhf_runtime.weight_sync.source import RecordingSource
from rlhf_runtime.weight_sync.transports import connect
from rlhf_runtime.weight_sync.verify import SendReport


class WeightSender:
    """Sends a policy's weights to every engine, again and again.

    Every rank of the policy makes one and calls `send`, since gathering sharded tensors is collective; only rank 0
    speaks to the engines.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        prefix: str,
        path: SyncPath,
        engines: list[Any] | VLLMWeightSyncClient,
        rank: int,
    ) -> None:
        """Join this rank to the engines.

        Args:
            module: The policy.
            prefix: Beginning of the module's parameter names that the checkpoint does not have.
            path: Transport and bucket size.
            engines: Ray handles of the rollout workers, or a client that stands for them.
            rank: This rank.

        Raises:
            WeightSyncError: when the engines cannot be reached over this path.
        """
        client = RayVLLMWeightSyncClient(engines) if isinstance(engines, list) else engines
        self._source = RecordingSource(module, prefix, record=rank == 0)
        self._transfer = connect(path, self._source, client, rank)

    def send(self) -> SendReport:
        """Send every weight once and say what was sent.

        Raises:
            WeightSyncError: or the engine's own error, when an engine could not take them.
        """
        self._transfer.send_weights()
        return SendReport(dict(self._source.checksums), sum(self._source.sizes()))
