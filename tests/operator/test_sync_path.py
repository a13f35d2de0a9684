import pytest
from rlhf_api import RLHFJob, SpecError
from rlhf_operator.plan import build_plan

OTHERS = ["critic", "reference", "reward"]
CPU = {"name": "p", "device": "cpu", "gpusPerNode": 4}
CUDA = {"name": "p", "gpusPerNode": 4}
TOGETHER = [{"roles": ["policy", "rollout", *OTHERS]}]
APART = [{"roles": ["policy", *OTHERS]}, {"roles": ["rollout"]}]


def planned(manifest, pools, groups, **weight_sync):
    manifest["spec"]["nodePools"] = pools
    manifest["spec"]["placement"] = {
        "groups": [{"name": f"g{i}", "pool": "p", **group} for i, group in enumerate(groups)]
    }
    manifest["spec"]["weightSync"] = weight_sync
    return build_plan(RLHFJob.parse(manifest), "runs/job").config.weight_sync


def wide(**group):
    """Policy and rollout together, in more than one bundle."""
    return [TOGETHER[0] | {"workers": 2} | group]


@pytest.mark.parametrize(
    ("pools", "groups", "method", "transport", "words"),
    [
        ([CUDA], TOGETHER, "auto", "ipc", "share group `g0` on the `cuda` pool `p`: weights take CUDA IPC"),
        ([CUDA], TOGETHER, "ipc", "ipc", "weights take CUDA IPC, as spec.weightSync.method asks"),
        ([CUDA | {"nodes": 2}], wide(), "auto", "ipc", "CUDA IPC"),
        ([CUDA], APART, "auto", "nccl", "policy runs in group `g0` on the `cuda` pool `p`, rollout in group `g1` on"),
        ([CUDA, CUDA | {"name": "q"}], [APART[0], APART[1] | {"pool": "q"}], "auto", "nccl", "pool `q`: weights are"),
        ([CPU], TOGETHER, "auto", "shm", "share group `g0` on the `cpu` pool `p`: weights take shared memory"),
        ([CPU], TOGETHER, "broadcast", "gloo", "broadcast by gloo, as spec.weightSync.method asks"),
        ([CPU], APART, "auto", "gloo", "broadcast by gloo"),
        ([CPU], APART, "broadcast", "gloo", "broadcast by gloo"),
        ([CPU], wide(), "ipc", "shm", "shared memory"),
        ([CPU | {"nodes": 2}], TOGETHER, "auto", "shm", "shared memory"),
        ([CPU | {"nodes": 2}], wide(), "auto", "gloo", "and its 2 bundles may lie on several nodes"),
        ([CPU | {"nodes": 2}], wide(strategy="STRICT_PACK"), "auto", "shm", "shared memory"),
        ([CPU | {"nodes": 2}], wide(strategy="STRICT_PACK", fallback=["PACK"]), "auto", "gloo", "several nodes"),
        ([CPU | {"nodes": 2}], wide(workers=3, strategy="STRICT_SPREAD", fallback=["STRICT_PACK"]), "auto", "shm", ""),
    ],
)  # fmt: skip
def test_weights_take_the_path_that_the_placement_asks_for(manifest, pools, groups, method, transport, words):
    sync = planned(manifest, pools, groups, method=method)
    assert sync.transport == transport
    assert words in sync.reason


def test_the_settings_reach_the_runtime(manifest):
    sync = planned(manifest, [CPU], TOGETHER, bucketMiB=3, verify="none", timeoutSeconds=5)
    assert (sync.bucket_bytes, sync.verify, sync.timeout_seconds) == (3 * 1024 * 1024, False, 5)
    assert planned(manifest, [CPU], TOGETHER).verify


@pytest.mark.parametrize(
    ("pools", "groups", "method", "line"),
    [
        (
            [CUDA], TOGETHER, "broadcast",
            "spec.weightSync.method: got 'broadcast'; expected 'ipc' or 'auto' for policy and rollout on the GPUs of "
            "spec.placement.groups[0]. Fix: use `auto`: NCCL refuses two ranks on one GPU",
        ),
        (
            [CPU], APART, "ipc",
            "spec.weightSync.method: got 'ipc'; expected policy and rollout in one group, to share memory. "
            "Fix: use `auto`, or colocate them",
        ),
        (
            [CPU | {"nodes": 2}], wide(), "ipc",
            "spec.weightSync.method: got 'ipc'; expected spec.placement.groups[0] on one node, to share memory: its "
            "strategies allow several. Fix: use `auto`, or set STRICT_PACK without a fallback",
        ),
        (
            [CPU, CUDA | {"name": "q"}], [APART[0], APART[1] | {"pool": "q"}], "auto",
            "spec.placement.groups[1].pool: got a `cuda` pool for rollout, a `cpu` pool for policy; expected one "
            "device for both. Fix: move one of the two, or set `device` of a pool: weights travel between GPUs or "
            "between CPUs",
        ),
        (
            [CUDA], [APART[0], APART[1] | {"workers": 2, "gpusPerWorker": 0.5}], "auto",
            "spec.placement.groups[1].gpusPerWorker: got 0.5, which leaves room for another engine on an engine's GPU; "
            "expected a GPU for each. Fix: use 1: NCCL, by which weights are broadcast, refuses two ranks on one GPU",
        ),
        (
            [CUDA], [APART[0] | {"gpusPerWorker": 0.3}, APART[1] | {"gpusPerWorker": 0.7}], "auto",
            "spec.placement.groups[1].gpusPerWorker: got 0.7, which leaves room for policy on an engine's GPU; "
            "expected a GPU for each. Fix: use 1: NCCL, by which weights are broadcast, refuses two ranks on one GPU",
        ),
    ],
)  # fmt: skip
def test_paths_that_there_are_not(manifest, pools, groups, method, line):
    with pytest.raises(SpecError) as caught:
        planned(manifest, pools, groups, method=method)
    assert [str(error) for error in caught.value.errors] == [line]


def test_shares_of_different_gpus_are_no_trouble(manifest):
    groups = [APART[0] | {"gpusPerWorker": 0.5}, APART[1] | {"gpusPerWorker": 0.6, "workers": 2}]
    assert planned(manifest, [CUDA], groups).transport == "nccl"
