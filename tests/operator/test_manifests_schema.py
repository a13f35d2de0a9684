"""Whatever is planned renders objects that Kubernetes and KubeRay take; whatever is not is refused with paths."""

import copy
import json
from typing import Any

import jsonschema
import kubernetes_validate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_api import RLHFJob, SpecError
from rlhf_api.placement import capacity, room
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifests import Manifest, Owner, Rendered, check_pruned, render

KUBERNETES = "1.34"
quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

names = st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)
long_names = st.integers(1, 63).map(lambda length: "p" * length) | names
quantities = st.sampled_from(["1Gi", "64Gi", "1.5Ti", "2000000000", "2e10", 4_000_000_000, "+8G", "0.9Gi", "1024Mi"])
variables = st.lists(
    st.fixed_dictionaries({"name": st.from_regex(r"X[A-Z_]{0,9}", fullmatch=True)})
    | st.builds(lambda name: {"name": f"S{name}", "value": "$(HOME)"}, st.integers(0, 9)),
    max_size=3,
    unique_by=lambda variable: variable["name"],
)
tolerations = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "key": st.just("nvidia.com/gpu"),
            "operator": st.just("Exists"),
            "effect": st.sampled_from(["NoSchedule", "NoExecute"]),
            "tolerationSeconds": st.integers(0, 100),
        },
    ),
    max_size=2,
)
overrides = st.sampled_from(
    [
        {"metadata": {"annotations": {"a": "b"}, "labels": {"volcano.sh/queue-name": "q"}}},
        {"spec": {"containers": [{"name": "ray", "env": [{"name": "HOME", "value": "/x"}], "tty": True}]}},
        {"spec": {"initContainers": [{"name": "fetch", "image": "i", "command": ["true"]}], "dnsPolicy": "Default"}},
        {"spec": {"volumes": [{"name": "rlhf-scratch", "emptyDir": {"sizeLimit": "1Ti"}}], "subdomain": "a"}},
        {"spec": {"serviceAccountName": "reader", "terminationGracePeriodSeconds": 60}},
    ]
)
scheduling: dict[str, Any] = {
    "nodeSelector": st.dictionaries(names, names, max_size=2),
    "tolerations": tolerations,
    "affinity": st.just(
        {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    ),
    "topologySpreadConstraints": st.just([{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway"}]),
    "priorityClassName": names,
    "runtimeClassName": names,
    "schedulerName": names,
    "env": variables,
    "podTemplate": overrides,
}
pools = st.fixed_dictionaries(
    {"nodes": st.integers(1, 3), "gpusPerNode": st.integers(0, 8)},
    optional={
        "cpu": st.sampled_from([64, "64", "96000m", "0.064k"]),
        "memory": quantities,
        "gpuResource": st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-1g.10gb"]),
        "rdma": st.just({"resource": "rdma/hca", "count": 4}),
        **scheduling,
    },
)
heads = st.fixed_dictionaries({}, optional={"cpu": st.just("500m"), "memory": quantities, **scheduling})


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Valid manifests of a cluster: the roles of a job on one pool, or the rollout on another, which may scale."""
    train, rollout = draw(pools) | {"name": draw(long_names)}, draw(pools) | {"name": "rollout"}
    apart = draw(st.booleans())
    if apart:
        rollout["device"] = train["device"] = "cpu"  # where GPUs are made up, any number of workers fits
        fewest = draw(st.integers(1, rollout["nodes"]))
        rollout |= draw(st.sampled_from([{}, {"minNodes": fewest, "maxNodes": rollout["nodes"] + 2}]))
    roles = ["policy", "critic", "reference", "reward"]
    groups = [{"name": "actor", "pool": train["name"], "roles": roles if apart else [*roles, "rollout"]}]
    groups += [{"name": "engines", "pool": "rollout", "roles": ["rollout"]}] if apart else []
    spec = {
        "image": "runtime:1",
        "models": {"policy": {"random": {"architecture": "qwen2"}}},
        "rewards": [{"name": "digits", "function": {"name": "digit_share"}}],
        "data": {"prompts": {"builtin": "arithmetic"}},
        "algorithm": {"ppo": {}},
        "training": {"steps": 3},
        "nodePools": [train, *([rollout] if apart else [])],
        "placement": {"groups": groups},
        "head": draw(heads),
        "env": draw(variables),
        "suspend": draw(st.booleans()),
    }
    if draw(st.booleans()):
        spec["storage"] = [{"name": "out", "persistentVolumeClaim": "out", "mountPath": "/out", "readOnly": False}]
        spec |= {"checkpoint": {"path": "/out/job"}, "code": {"configMap": "code"}}
        spec["imagePullSecrets"] = [{"name": "registry"}]
    name = draw(st.integers(1, 45).map(lambda length: "j" * length))
    return {"apiVersion": "rlhf-operator.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": name}, "spec": spec}


def groups_of(cluster: Manifest) -> list[Manifest]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


@quick
@given(manifest=manifests())
def test_every_valid_job_renders_objects_that_kubernetes_and_kuberay_take(manifest, kuberay_crd):
    plan = plan_cluster(RLHFJob.parse(copy.deepcopy(manifest)))
    made = render(plan, Owner("uid", manifest["metadata"]["name"], "team"), 1)
    assert render(plan, Owner("uid", manifest["metadata"]["name"], "team"), 1) == made
    others = [rendered for rendered in made.objects if rendered["kind"] != "RayCluster"]
    pods = [{"apiVersion": "v1", "kind": "Pod", **group["template"]} for group in groups_of(made.ray_cluster)]
    for rendered in [*others, *pods]:
        kubernetes_validate.validate(rendered, KUBERNETES, strict=True)
    assert check_pruned(made.objects, kuberay_crd) == []
    schema = kuberay_crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    jsonschema.Draft7Validator(schema).validate(made.ray_cluster)
    for group, worker_group in zip(plan.groups, made.ray_cluster["spec"]["workerGroupSpecs"], strict=False):
        params = worker_group["rayStartParams"]
        node = {"CPU": float(params["num-cpus"]), "GPU": float(params["num-gpus"])}
        node |= json.loads(params["resources"].strip("'"))
        assert room([capacity(node, group.resources)] * worker_group["replicas"], group.strategy) >= group.count


RAW: Manifest = {
    "metadata": {"labels": {"env": "a"}},
    "spec": {
        "containers": [
            {
                "name": "ray",
                "env": [{"name": "A", "value": "b"}],
                "ports": [{"name": "p", "containerPort": 1}],
                "resources": {"limits": {"hugepages-2Mi": "1Gi"}},
                "securityContext": {"capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}},
                "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                "livenessProbe": {"httpGet": {"port": 1}},
            },
            {"name": "side", "image": "i", "lifecycle": {"preStop": {"tcpSocket": {"port": 1}}}},
        ],
        "initContainers": [{"name": "init", "image": "i"}],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "securityContext": {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "1"}], "seLinuxOptions": {}},
    },
}
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9000) | st.sampled_from(["", "ray", "/tmp", "name", "ALL", "rlhf-tmp"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", "add", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def spots(node: Any) -> Any:
    """Every (container, key) below a node."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from spots(node[key])


def rendered_or_refused(manifest: Manifest) -> tuple[Rendered | None, list[str]]:
    try:
        return render(plan_cluster(RLHFJob.parse(manifest)), None, 1), []
    except SpecError as error:
        return None, [str(problem) for problem in error.errors]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_override_is_rendered_or_refused_with_paths(data, cluster_manifest):
    template = copy.deepcopy(RAW)
    for _ in range(data.draw(st.integers(0, 3))):
        container, key = data.draw(st.sampled_from(list(spots(template))))
        container[key] = data.draw(junk)
    manifest = copy.deepcopy(cluster_manifest)
    manifest["spec"]["nodePools"][0]["podTemplate"] = template
    made, problems = rendered_or_refused(manifest)
    if made is None:
        assert problems
        assert all(problem.startswith("spec.nodePools[0].podTemplate") for problem in problems)
        return
    pod = made.ray_cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["containers"][0]["name"] == "ray"
    assert all(container["securityContext"]["allowPrivilegeEscalation"] is False for container in pod["containers"])
    json.dumps(made.objects)


def test_the_override_is_right_as_it_stands(cluster_manifest, kuberay_crd):
    cluster_manifest["spec"]["nodePools"][0]["podTemplate"] = RAW
    made = render(plan_cluster(RLHFJob.parse(cluster_manifest)), None, 1)
    assert check_pruned(made.objects, kuberay_crd) == []


def test_an_override_with_a_field_that_no_pod_has_is_told(cluster_manifest, kuberay_crd):
    cluster_manifest["spec"]["nodePools"][0]["podTemplate"] = {"spec": {"hostAlias": [], "tolerations": {}}}
    made = render(plan_cluster(RLHFJob.parse(cluster_manifest)), None, 1)
    paths = [problem.path for problem in check_pruned(made.objects, kuberay_crd)]
    pod = "RayCluster.spec.workerGroupSpecs[0].template.spec"
    assert paths == [f"{pod}.hostAlias", f"{pod}.tolerations"]
