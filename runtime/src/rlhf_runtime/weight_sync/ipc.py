"""The `ipc` transport: vLLM's CUDA IPC backend, with a record of what arrived."""

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

from rlhf_runtime.weight_sync.receive import RecordedReceive

BACKEND = "rlhf_ipc"
"""The engine's side; the trainer's is vLLM's own `ipc`."""


class RecordedIPCWeightTransferEngine(RecordedReceive, IPCWeightTransferEngine):
    """vLLM's engine side, recorded."""


WeightTransferEngineFactory.register_engine(BACKEND, RecordedIPCWeightTransferEngine)
