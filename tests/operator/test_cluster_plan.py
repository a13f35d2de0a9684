import pytest
from rlhf_api import RLHFJob, SpecError
from rlhf_operator.cluster_plan import plan_cluster

STORAGE = [{"name": "out", "persistentVolumeClaim": "out", "mountPath": "/checkpoints"}]


def errors_of(manifest, image=None):
    with pytest.raises(SpecError) as caught:
        plan_cluster(RLHFJob.parse(manifest), image)
    return [str(error) for error in caught.value.errors]


def notes_of(manifest):
    return "\n".join(plan_cluster(RLHFJob.parse(manifest)).notes)


def test_the_image_is_the_jobs_or_the_operators_default(cluster_manifest):
    job = RLHFJob.parse(cluster_manifest)
    assert plan_cluster(job, "default:1").image == "runtime:1"
    del cluster_manifest["spec"]["image"]
    made = plan_cluster(RLHFJob.parse(cluster_manifest), "default:1")
    assert made.image == made.job.spec.image == "default:1"
    for none in (None, ""):
        [error] = errors_of(cluster_manifest, none)
        assert error.startswith("spec.image: got nothing; expected the runtime's image")


def test_all_problems_are_told_at_once(cluster_manifest):
    spec = cluster_manifest["spec"]
    del spec["image"]
    spec["checkpoint"] = {}
    spec["placement"]["groups"][0]["workers"] = 9
    assert [error.split(":")[0] for error in errors_of(cluster_manifest)] == [
        "spec.image",
        "spec.checkpoint.path",
        "spec.placement.groups[0]",
    ]


def test_the_pools_count_is_the_clusters_and_nothing_is_ignored(cluster_manifest):
    cluster_manifest["spec"]["nodePools"][0] |= {"nodeSelector": {"a": "b"}}
    made = plan_cluster(RLHFJob.parse(cluster_manifest))
    assert made.config.local_nodes is None
    assert "ignored" not in "\n".join(made.notes)


@pytest.mark.parametrize(("path", "said"), [("checkpoints", "in the run's folder"), ("/tmp/x", "`/tmp/x`")])
def test_checkpoints_that_would_go_with_their_pod_are_refused(cluster_manifest, path, said):
    cluster_manifest["spec"] |= {"checkpoint": {"path": path}, "storage": STORAGE}
    [error] = errors_of(cluster_manifest)
    assert error.startswith("spec.checkpoint.path: got ")
    assert said in error


def test_the_run_folder_lies_beside_the_checkpoints(cluster_manifest):
    without = plan_cluster(RLHFJob.parse(cluster_manifest))
    assert without.config.run_dir == "/rlhf/runs/job"
    assert "model and log go with the cluster" in "\n".join(without.notes)
    cluster_manifest["spec"] |= {"checkpoint": {"path": "/checkpoints/a/"}, "storage": STORAGE}
    made = plan_cluster(RLHFJob.parse(cluster_manifest))
    assert made.config.run_dir == "/checkpoints/a/run"
    assert made.config.checkpoint.path == "/checkpoints/a/"
    assert "goes with the cluster" not in "\n".join(made.notes)


def test_paths_lead_to_a_storage_or_into_the_image(cluster_manifest):
    cluster_manifest["spec"] |= {"storage": STORAGE, "models": {"policy": {"path": "/checkpoints/model"}}}
    assert "/checkpoints/model" not in notes_of(cluster_manifest)
    cluster_manifest["spec"]["models"]["policy"]["path"] = "/opt/model"
    assert "spec.models.policy.path: `/opt/model` is on no storage, so it has to be in the image" in notes_of(
        cluster_manifest
    )
    cluster_manifest["spec"]["models"]["policy"]["path"] = "model"
    cluster_manifest["spec"]["data"]["prompts"] = {"path": "data.jsonl"}
    paths = [error.split(":")[0] for error in errors_of(cluster_manifest)]
    assert paths == ["spec.models.policy.path", "spec.data.prompts.path"]


BAD = [
    ("storage[0].name", {"storage": [{**STORAGE[0], "name": "shared-mem"}]}),
    ("storage[0].mountPath", {"storage": [{**STORAGE[0], "mountPath": "/"}]}),
    ("storage[0].mountPath", {"storage": [{**STORAGE[0], "mountPath": "/tmp/"}]}),
    ("storage[0].mountPath", {"storage": [{**STORAGE[0], "mountPath": "/a:b"}]}),
    ("head.memory", {"head": {"memory": "100Mi"}}),
    ("env[0].name", {"env": [{"name": "RAY_AUTH_MODE", "value": "disabled"}]}),
    ("code.configMap", {"code": {"configMap": "job-2"}}),
    ("rayVersion", {"rayVersion": "2.9.0"}),
    ("rayVersion", {"rayVersion": "2.52.1"}),
    ("rayVersion", {"rayVersion": "1.60.0"}),
]
BAD_POOLS = [
    ("memory", {"memory": "100M"}),
    ("sharedMemory", {"sharedMemory": "64Gi"}),
    ("sharedMemory", {"sharedMemory": "1Mi"}),
    ("gpuResource", {"gpuResource": "gpu"}),
    ("rdma.resource", {"rdma": {"resource": "hca"}}),
    ("rdma.resource", {"rdma": {"resource": "nvidia.com/gpu"}}),
    ("env[0].name", {"env": [{"name": "RAY_ADDRESS", "value": "x"}]}),
]


@pytest.mark.parametrize(("field", "change"), BAD)
def test_what_pods_cannot_have_is_refused_by_name(cluster_manifest, field, change):
    cluster_manifest["spec"] |= change
    [error] = errors_of(cluster_manifest)
    assert error.startswith(f"spec.{field}: got ")


@pytest.mark.parametrize(
    "change",
    [
        {"rayVersion": "2.53.0"},
        {"rayVersion": "3.0.0"},
        {"code": {"configMap": "job-rewards"}},
        {"code": {"configMap": "other-2"}},
    ],
)
def test_what_is_near_to_it_is_taken(cluster_manifest, change):
    cluster_manifest["spec"] |= change
    assert plan_cluster(RLHFJob.parse(cluster_manifest)).groups


@pytest.mark.parametrize(("field", "change"), BAD_POOLS)
def test_what_pods_of_a_pool_cannot_have_is_refused_by_name(cluster_manifest, field, change):
    cluster_manifest["spec"]["nodePools"][0] |= change
    [error] = errors_of(cluster_manifest)
    assert error.startswith(f"spec.nodePools[0].{field}: got ")


def test_a_pool_cannot_have_the_name_of_the_heads_group(cluster_manifest):
    cluster_manifest["spec"]["nodePools"][0]["name"] = "headgroup"
    cluster_manifest["spec"]["placement"]["groups"][0]["pool"] = "headgroup"
    [error] = errors_of(cluster_manifest)
    assert error.startswith("spec.nodePools[0].name: got `headgroup`")
    cluster_manifest["spec"]["nodePools"][0]["name"] = "head"
    cluster_manifest["spec"]["placement"]["groups"][0]["pool"] = "head"
    assert plan_cluster(RLHFJob.parse(cluster_manifest)).groups


def test_a_pool_without_memory_is_told_of(cluster_manifest):
    del cluster_manifest["spec"]["nodePools"][0]["memory"]
    assert "spec.nodePools[0].memory was left out" in notes_of(cluster_manifest)
