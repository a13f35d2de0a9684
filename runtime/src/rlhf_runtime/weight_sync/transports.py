"""The one place that knows how a transport of the plan is spelled in vLLM's weight-transfer API.

Importing it registers our backends, in a trainer as in an engine's workers (they import it by `WORKER_EXTENSION`).
"""

import torch
from rlhf_api.runtime_config import SyncPath
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

from rlhf_runtime.weight_sync import gloo, ipc, nccl, shm
from rlhf_runtime.weight_sync.client import EngineClient
from rlhf_runtime.weight_sync.receive import TransferExtension
from rlhf_runtime.weight_sync.source import RecordingSource

ENGINE_BACKENDS = {"nccl": nccl.BACKEND, "gloo": gloo.BACKEND, "ipc": ipc.BACKEND, "shm": shm.BACKEND}
"""Transport -> backend name on the engine's side."""


class WorkerExtension(TransferExtension):
    """`worker_extension_cls` of every engine."""

    def compile_nothing(self) -> None:
        """Run vLLM's sampler as it is written.

        It compiles two small functions even in eager mode: half a minute, and a C++ compiler, for nothing on a CPU.
        """
        torch.compiler.set_stance("force_eager")


WORKER_EXTENSION = f"{__name__}.{WorkerExtension.__qualname__}"


def connect(
    path: SyncPath, source: RecordingSource, client: EngineClient, rank: int, host: str
) -> TrainerWeightTransferEngine:
    """Join trainer and engines over the plan's transport; every trainer rank calls it, rank 0 sends.

    Raises:
        WeightSyncError: when they cannot be joined.
    """
    info = _init_info(path, source, rank, host)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _init_info(path: SyncPath, source: RecordingSource, rank: int, host: str) -> TrainerInitInfo:
    match path.transport:
        case "nccl":
            return nccl.NCCLSenderInitInfo(path.bucket_bytes, host, rank=rank)
        case "gloo":
            return gloo.GlooTrainerInitInfo(path.bucket_bytes, host, rank=rank)
        case "shm":
            return shm.ShmTrainerInitInfo(path.bucket_bytes, host, rank=rank)
        case "ipc":
            # One buffer that no tensor may exceed, and none larger than the model needs.
            sizes = source.sizes()
            size = max(min(path.bucket_bytes, sum(sizes)), max(sizes))
            return IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=rank)
