"""New weights from the policy to the rollout engines, proved to have arrived.

    driver    sync_weights: pause -> send -> publish -> compare -> resume
    policy    WeightSender over RecordingSource: gathers a tensor at a time, remembers the checksum of what it sends
    transport vLLM's weight-transfer API: `ipc` on GPUs, our `shm` on CPU, chosen in transports.py alone
    engine    RecordedReceive: remembers the checksum of what arrived and which parameters it filled

Driver code imports this package and gets no vLLM with it; only the modules that a policy worker or an engine imports
(source, sender, transports, shm, ipc, receive's worker extension) may.
"""

from rlhf_runtime.weight_sync.sync import SyncReport, sync_weights
from rlhf_runtime.weight_sync.verify import ReceivedWeights, SendReport

__all__ = ["ReceivedWeights", "SendReport", "SyncReport", "sync_weights"]
