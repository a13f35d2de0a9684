"""Where a job's log is once the RayCluster of its last try is gone. Pure."""

import posixpath

from rlhf_api import RLHFJobSpec
from rlhf_api.runtime_config import DRIVER_LOG

from rlhf_operator.cluster_plan import run_dir
from rlhf_operator.volumes import below, volume_of


def kept_log(name: str, spec: RLHFJobSpec) -> str:
    """One sentence: the file and its claim, or how the next job keeps its log.

    Args:
        name: the job's name.
        spec: its spec.
    """
    path = posixpath.join(run_dir(name, spec), DRIVER_LOG)
    volume = volume_of(path, spec.storage)
    if volume is None:
        return "The log went with the RayCluster; `checkpoint` on a storage keeps the next job's, in its run folder."
    inside, claim = below(path, volume.mount_path), volume.persistent_volume_claim
    return f"The log of all tries is kept: {inside} on PersistentVolumeClaim {claim}, which pods see as {path}."
