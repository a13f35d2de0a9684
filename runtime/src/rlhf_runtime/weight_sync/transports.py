"""The one place that knows how a transport of the plan is spelled in vLLM's weight-transfer API.

Importing it registers our backends, in a trainer as in an engine's workers (they import it by `WORKER_EXTENSION`).
"""

from rlhf_api.runtime_config import SyncPath
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

from rlhf_runtime.weight_sync import ipc, shm
from rlhf_runtime.weight_sync.buffer import buffer_bytes
from rlhf_runtime.weight_sync.receive import ReceivedWeightsExtension
from rlhf_runtime.weight_sync.source import RecordingSource

ENGINE_BACKENDS = {"ipc": ipc.BACKEND, "shm": shm.BACKEND}
"""Transport -> backend name on the engine's side."""


class WorkerExtension(ReceivedWeightsExtension):
    """`worker_extension_cls` of every engine."""


WORKER_EXTENSION = f"{__name__}.{WorkerExtension.__qualname__}"


def connect(
    path: SyncPath, source: RecordingSource, client: VLLMWeightSyncClient, rank: int
) -> TrainerWeightTransferEngine:
    """Join trainer and engines over the plan's transport; every trainer rank calls it, rank 0 sends.

    Raises:
        WeightSyncError: when they cannot be joined.
    """
    return WeightTransferTrainerFactory.trainer_init(_init_info(path, source, rank), client=client, source=source)


def _init_info(path: SyncPath, source: RecordingSource, rank: int) -> TrainerInitInfo:
    size = buffer_bytes(source.sizes(), path.bucket_bytes)
    if path.transport == "shm":
        return shm.ShmTrainerInitInfo(size, rank=rank)
    return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=rank)
