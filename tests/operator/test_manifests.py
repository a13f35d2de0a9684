import json
from pathlib import Path

import pytest
from rlhf_api import RLHFJob, RuntimeConfig, SpecError
from rlhf_api.placement import capacity, room
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest
from rlhf_operator.manifests import Owner, check_pruned, entrypoint, render, submission_id

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


def head_of(objects):
    return objects["RayCluster"]["spec"]["headGroupSpec"]


def workers_of(objects):
    return {group["groupName"]: group for group in objects["RayCluster"]["spec"]["workerGroupSpecs"]}


def container_of(group):
    [container] = group["template"]["spec"]["containers"]
    return container


def env_of(group):
    return {variable["name"]: variable for variable in container_of(group)["env"]}


def ray_node(group):
    """What a Ray node of the group offers, read from what its `ray start` is told."""
    params = group["rayStartParams"]
    custom = json.loads(params.get("resources", "'{}'").strip("'"))
    return {"CPU": float(params["num-cpus"]), "GPU": float(params["num-gpus"]), **custom}


def volumes_of(group):
    return {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}


def mounts_of(group):
    return {mount["mountPath"]: mount for mount in container_of(group)["volumeMounts"]}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_example_fits_on_its_groups_by_what_ray_and_kubernetes_are_told(file):
    plan = plan_cluster(read_manifest(file), "runtime:1")
    groups = {group["groupName"]: group for group in render(plan, None, 1).ray_cluster["spec"]["workerGroupSpecs"]}
    for worker_group in plan.config.groups:
        [pool] = [name for name in groups if f"pool-{name}" in worker_group.bundle]
        nodes = [capacity(ray_node(groups[pool]), worker_group.bundle)] * groups[pool]["replicas"]
        assert room(nodes, worker_group.strategy) >= worker_group.workers
    for pool in plan.job.spec.node_pools:
        node, limits = ray_node(groups[pool.name]), container_of(groups[pool.name])["resources"]["limits"]
        assert node["GPU"] == int(limits.get(pool.gpu_resource, 0)) == pool.gpus_per_node


def test_the_head_offers_nothing_to_ray_and_takes_no_gpu(cluster_manifest, rendered):
    head = head_of(rendered(cluster_manifest))
    assert ray_node(head) == {"CPU": 0, "GPU": 0}
    assert container_of(head)["resources"] == {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {"memory": "4Gi"}}
    assert env_of(head)["NVIDIA_VISIBLE_DEVICES"]["value"] == "void"
    assert head["template"]["spec"]["restartPolicy"] == "Never"
    ports = {port["name"]: port["containerPort"] for port in container_of(head)["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "progress": 8090}


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_rays_autoscaler_reads_the_clusters_of_all_examples_as_ray_will_find_them(file, autoscaling_config):
    plan = plan_cluster(read_manifest(file), "runtime:1")
    cluster = render(plan, Owner("uid-1", plan.job.metadata.name, "team"), 1).ray_cluster
    nodes = autoscaling_config(cluster)["available_node_types"]
    assert nodes.pop("headgroup")["resources"].items() >= {"CPU": 0, "GPU": 0}.items()
    for group in cluster["spec"]["workerGroupSpecs"]:
        read = nodes.pop(group["groupName"])
        assert read["resources"].items() >= ray_node(group).items()
        assert (read["min_workers"], read["max_workers"]) == (group["minReplicas"], group["maxReplicas"])
    assert nodes == {}


@pytest.mark.parametrize("resource", ["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb"])
def test_gpus_of_any_vendor_and_slices_are_asked_for_and_told_to_ray(cluster_manifest, rendered, resource):
    cluster_manifest["spec"]["nodePools"][0] |= {"gpuResource": resource, "rdma": {"resource": "rdma/hca", "count": 2}}
    group = workers_of(rendered(cluster_manifest))["gpu"]
    for kind in ("requests", "limits"):
        asked = container_of(group)["resources"][kind]
        assert (asked[resource], asked["rdma/hca"]) == ("8", "2")
    assert ray_node(group) == {"CPU": 24, "GPU": 8, "pool-gpu": 1}
    assert "NVIDIA_VISIBLE_DEVICES" not in env_of(group)
    assert "resources" not in group  # beside rayStartParams KubeRay refuses them


def test_pools_become_groups_that_stay_as_large_as_they_are(cluster_manifest, rendered):
    cluster_manifest["spec"]["nodePools"].append({"name": "spare", "nodes": 3, "cpu": "500m", "memory": "2Gi"})
    objects = rendered(cluster_manifest)
    spare = workers_of(objects)["spare"]
    assert (spare["replicas"], spare["minReplicas"], spare["maxReplicas"]) == (3, 3, 3)
    assert container_of(spare)["resources"]["limits"] == {"cpu": "500m", "memory": "2Gi"}
    assert "enableInTreeAutoscaling" not in objects["RayCluster"]["spec"]
    assert not head_of(objects)["template"]["spec"]["automountServiceAccountToken"]


def test_a_pool_that_scales_brings_the_autoscaler_under_the_same_standard(cluster_manifest, rendered):
    spec = cluster_manifest["spec"]
    spec["nodePools"].append({"name": "rollout", "nodes": 2, "gpusPerNode": 4, "minNodes": 1, "maxNodes": 3})
    spec["placement"]["groups"][0]["roles"].remove("rollout")
    spec["placement"]["groups"].append({"name": "rollout", "pool": "rollout", "roles": ["rollout"], "workers": 4})
    objects = rendered(cluster_manifest)
    cluster, workers = objects["RayCluster"]["spec"], workers_of(objects)
    sizes = [workers["rollout"][name] for name in ("replicas", "minReplicas", "maxReplicas")]
    assert sizes == [2, 1, 3]
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["autoscalerOptions"]["securityContext"] == container_of(head_of(objects))["securityContext"]
    assert head_of(objects)["template"]["spec"]["automountServiceAccountToken"]
    assert workers["rollout"]["template"]["spec"].get("restartPolicy", "Never") == "Never"
    assert not workers["rollout"]["template"]["spec"]["automountServiceAccountToken"]


@pytest.mark.parametrize(
    ("memory", "shared", "size", "store"),
    [
        ("100Gi", None, "51200Mi", 30 * 2**30),  # Ray's own 30 %
        ("100Gi", "80Gi", "80Gi", 30 * 2**30),
        ("100Gi", "10Gi", "10Gi", 7 * 2**30),  # 70 % of the shared memory
        (None, "10Gi", "10Gi", 7 * 2**30),
        (None, None, None, None),
    ],
)
def test_the_object_store_fits_into_shared_memory_beside_what_else_lives_there(
    cluster_manifest, rendered, memory, shared, size, store
):
    pool = cluster_manifest["spec"]["nodePools"][0]
    pool |= {"memory": memory, "sharedMemory": shared}
    group = workers_of(rendered(cluster_manifest))["gpu"]
    volume = {"medium": "Memory", "sizeLimit": size} if size else {"medium": "Memory"}
    assert volumes_of(group)["shared-mem"]["emptyDir"] == volume
    assert mounts_of(group)["/dev/shm"]["name"] == "shared-mem"
    told = group["rayStartParams"].get("object-store-memory")
    assert told is None if store is None else abs(int(told) - store) <= 1


def test_a_node_without_given_cpus_asks_for_its_part_while_ray_may_fill_any_one(cluster_manifest, rendered):
    cluster_manifest["spec"]["nodePools"][0]["nodes"] = 2
    group = workers_of(rendered(cluster_manifest))["gpu"]
    assert ray_node(group)["CPU"] == 24  # 8 bundles of three processes
    assert container_of(group)["resources"]["requests"]["cpu"] == "12"
    assert "cpu" not in container_of(group)["resources"]["limits"]


def test_volumes_code_and_the_config_are_where_the_runtime_looks_for_them(cluster_manifest, rendered):
    cluster_manifest["spec"] |= {
        "code": {"configMap": "my-rewards"},
        "storage": [
            {"name": "models", "persistentVolumeClaim": "all-models", "mountPath": "/models", "readOnly": True},
            {"name": "out", "persistentVolumeClaim": "out", "mountPath": "/checkpoints"},
        ],
        "checkpoint": {"path": "/checkpoints/a"},
    }
    objects = rendered(cluster_manifest, cluster=2)
    config = RuntimeConfig.parse(json.loads(objects["ConfigMap"]["data"]["runtime.json"]))
    head, worker = head_of(objects), workers_of(objects)["gpu"]
    assert volumes_of(head)["rlhf-config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"] == "job-2"
    assert mounts_of(head)["/etc/rlhf"]["readOnly"]
    assert "/etc/rlhf" not in mounts_of(worker)  # workers are told by the driver
    assert config.local_nodes is None
    assert config.run_dir == "/checkpoints/a/run"  # with the head the trained model would go
    for group in (head, worker):
        assert volumes_of(group)["models"]["persistentVolumeClaim"] == {"claimName": "all-models", "readOnly": True}
        assert volumes_of(group)["out"]["persistentVolumeClaim"] == {"claimName": "out"}
        assert (mounts_of(group)["/models"]["readOnly"], "readOnly" in mounts_of(group)["/checkpoints"]) == (
            True,
            False,
        )
        [code] = config.python_path
        assert volumes_of(group)[mounts_of(group)[code]["name"]]["configMap"]["name"] == "my-rewards"
        assert {"/tmp", "/tmp/ray", "/rlhf"} <= mounts_of(group).keys()  # all else of the root is read-only


def test_variables_of_pods_go_over_those_of_the_job_and_secrets_stay_references(cluster_manifest, rendered):
    secret = {"secretKeyRef": {"name": "hub", "key": "token"}}
    cluster_manifest["spec"] |= {
        "env": [{"name": "A", "value": "job"}, {"name": "TOKEN", "valueFrom": secret}, {"name": "HOME", "value": "/h"}],
        "head": {"env": [{"name": "A", "value": "head"}]},
    }
    cluster_manifest["spec"]["nodePools"][0]["env"] = [{"name": "NCCL_DEBUG", "value": "INFO"}]
    objects = rendered(cluster_manifest)
    head, worker = env_of(head_of(objects)), env_of(workers_of(objects)["gpu"])
    assert (head["A"]["value"], worker["A"]["value"], worker["HOME"]["value"]) == ("head", "job", "/h")
    assert "NCCL_DEBUG" in worker
    assert "NCCL_DEBUG" not in head
    assert head["TOKEN"] == worker["TOKEN"] == {"name": "TOKEN", "valueFrom": secret}


def test_what_kubernetes_schedules_by_is_passed_through(cluster_manifest, rendered):
    given = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
    }
    cluster_manifest["spec"]["nodePools"][0] |= given
    cluster_manifest["spec"] |= {"imagePullSecrets": [{"name": "registry"}], "imagePullPolicy": "Always"}
    objects = rendered(cluster_manifest)
    pod = workers_of(objects)["gpu"]["template"]["spec"]
    assert {field: pod[field] for field in given} == given
    assert not set(given) & head_of(objects)["template"]["spec"].keys()
    for group in (head_of(objects), workers_of(objects)["gpu"]):
        assert group["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
        assert container_of(group)["imagePullPolicy"] == "Always"


def test_every_object_goes_with_the_job_and_can_be_found_by_it(cluster_manifest, rendered):
    for made in rendered(cluster_manifest, cluster=3).values():
        described = made["metadata"]
        assert (described["name"], described["namespace"]) == ("job-3", "team")
        [owner] = described["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            *("RLHFJob", "uid-1", True, False),
        )
        assert described["labels"]["rlhf-operator.io/job"] == "job"
        assert described["labels"]["rlhf-operator.io/cluster"] == "3"
        assert "finalizers" not in described


def test_a_lost_head_stays_lost_and_tokens_are_asked_for(cluster_manifest, rendered):
    cluster = rendered(cluster_manifest)["RayCluster"]
    assert cluster["metadata"]["annotations"]["ray.io/disable-provisioned-head-restart"] == "true"
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["spec"]["rayVersion"]
    assert "suspend" not in cluster["spec"]  # it may be a queue's to write
    cluster_manifest["spec"]["suspend"] = True
    assert rendered(cluster_manifest)["RayCluster"]["spec"]["suspend"] is True


def test_a_queue_finds_the_ray_cluster_and_nothing_else(cluster_manifest, rendered):
    queue = "kueue.x-k8s.io/queue-name"
    cluster_manifest["metadata"]["labels"] = {queue: "gpus", "mine": "x"}
    cluster_manifest["spec"]["rayCluster"] = {"labels": {"ray.io/scheduler-name": "volcano"}}
    objects = rendered(cluster_manifest)
    labels = objects["RayCluster"]["metadata"]["labels"]
    assert (labels[queue], labels["ray.io/scheduler-name"]) == ("gpus", "volcano")
    assert queue not in json.dumps([objects["ConfigMap"], objects["NetworkPolicy"], objects["RayCluster"]["spec"]])


@pytest.mark.parametrize("namespace", ["rlhf-system", None])
def test_the_network_is_open_to_the_jobs_pods_and_the_operator_alone(cluster_manifest, rendered, namespace):
    objects = rendered(cluster_manifest, operator_namespace=namespace)
    policy = objects["NetworkPolicy"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["podSelector"] == {"matchLabels": {"ray.io/cluster": "job-1"}}
    own, operator = policy["ingress"]
    assert own == {"from": [{"podSelector": policy["podSelector"]}]}
    [source] = operator["from"]
    named = source["namespaceSelector"].get("matchLabels", {}).get("kubernetes.io/metadata.name")
    assert named == namespace
    assert source["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "rlhf-operator"}}  # not its neighbours
    open_ports = {port["port"] for port in operator["ports"]}
    assert open_ports == {"dashboard", "progress", "metrics"}
    assert open_ports <= {port["name"] for port in container_of(head_of(objects))["ports"]}


def test_the_api_servers_proxy_gets_to_the_head_where_its_networks_are_told(cluster_manifest, rendered):
    rules = rendered(cluster_manifest, api_server=("10.0.0.0/24", "10.1.0.7/32"))["NetworkPolicy"]["spec"]["ingress"]
    proxy = rules[-1]
    assert proxy["from"] == [{"ipBlock": {"cidr": "10.0.0.0/24"}}, {"ipBlock": {"cidr": "10.1.0.7/32"}}]
    assert {port["port"] for port in proxy["ports"]} == {"dashboard", "progress"}
    assert rules[:-1] == rendered(cluster_manifest)["NetworkPolicy"]["spec"]["ingress"]


def test_names_stay_within_what_kuberay_allows(cluster_manifest, rendered):
    cluster_manifest["metadata"]["name"] = "j" * 45
    objects = rendered(cluster_manifest, cluster=9_999_999)
    assert {len(made["metadata"]["name"]) for made in objects.values()} == {53}
    assert submission_id("j" * 45, 9_999_999, 7).endswith("-9999999-7")
    labels = head_of(objects)["template"]["metadata"]["labels"]
    assert all(len(value) <= 63 for value in labels.values())


def test_the_driver_is_told_its_try_and_whether_there_may_be_checkpoints():
    driver = "python -m rlhf_runtime /etc/rlhf/runtime.json --try math-1-2"
    assert entrypoint("math-1-2", resume=False) == driver
    assert entrypoint("math-1-2", resume=True) == f"{driver} --resume"


def test_what_a_config_map_cannot_hold_is_refused_by_name(cluster_manifest):
    cluster_manifest["spec"]["data"]["prompts"] = {"inline": ["x" * 1000] * 1100}
    plan = plan_cluster(RLHFJob.parse(cluster_manifest))
    with pytest.raises(SpecError, match=r"spec.data.prompts.inline: got 1,\d+,\d+ bytes"):
        render(plan, None, 1)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_nothing_of_an_example_is_lost_on_the_kuberay_that_is_tested_with(file, kuberay_crd):
    assert check_pruned(render(plan_cluster(read_manifest(file), "runtime:1"), None, 1).objects, kuberay_crd) == []


def small_crd(**spec):
    group = {"type": "object", "properties": {"groupName": {"type": "string"}, "replicas": {"type": "integer"}}}
    fields = {"workerGroupSpecs": {"type": "array", "items": group}, "rayVersion": {"type": "string"}, **spec}
    schema = {"properties": {"spec": {"type": "object", "properties": fields}}}
    version = {"name": "v1", "served": True, "schema": {"openAPIV3Schema": schema}}
    return {"spec": {"group": "ray.io", "names": {"kind": "RayCluster"}, "versions": [version]}}


def test_what_an_older_kuberay_would_drop_is_refused_by_name(cluster_manifest, rendered):
    objects = rendered(cluster_manifest).values()
    problems = {problem.path: problem for problem in check_pruned(objects, small_crd())}
    assert "RayCluster.spec.authOptions" in problems  # without it the head would be open to all
    assert "RayCluster.spec.workerGroupSpecs[0].template" in problems
    assert "RayCluster.spec.rayVersion" not in problems
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    named = {"authOptions": {"type": "object", "additionalProperties": {"type": "string"}}, "headGroupSpec": free}
    left = [problem.path for problem in check_pruned(objects, small_crd(**named))]
    assert {path.rpartition(".")[0] for path in left} == {"RayCluster.spec.workerGroupSpecs[0]"}


def test_a_form_or_version_that_the_api_server_would_refuse_is_told(cluster_manifest, rendered):
    cluster = rendered(cluster_manifest)["RayCluster"]
    [problem] = [p for p in check_pruned([cluster], small_crd(authOptions={"type": "array"})) if "auth" in p.path]
    assert problem.expected == "a list"
    [problem] = check_pruned([cluster | {"apiVersion": "ray.io/v2"}], small_crd())
    assert (problem.got, problem.expected) == ("ray.io/v2", "one of ray.io/v1")
