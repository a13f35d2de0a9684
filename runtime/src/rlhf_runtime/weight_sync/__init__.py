"""New weights from the policy to the rollout engines, proved to have arrived.

    driver    sync_weights: pause -> send -> compare -> publish -> resume, repeated once when it fails
    policy    WeightSender over RecordingSource: gathers a tensor at a time, remembers the checksum of what it sends
    transport vLLM's weight-transfer API: broadcast by its `nccl` or our `gloo`, memory shared by its `ipc` or our `shm`
    engine    RecordedReceive: remembers the checksum of what arrived and which parameters it filled

Driver code imports this package and gets no vLLM with it; only what transports.py and sender.py import may. How
weights are cut into buckets (buckets), moved (pipeline, buffer, broadcast) and compared (verify) is plain torch.
"""

from rlhf_runtime.weight_sync.sync import SyncReport, sync_weights
from rlhf_runtime.weight_sync.verify import ReceivedWeights, SendReport

__all__ = ["ReceivedWeights", "SendReport", "SyncReport", "sync_weights"]
