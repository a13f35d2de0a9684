import pytest
from rlhf_api import SpecError

POOL = "spec.nodePools[0].podTemplate"


@pytest.fixture
def pod(cluster_manifest, rendered):
    """Renders a pod template of the one pool with an override."""

    def pod(spec=None, **template):
        cluster_manifest["spec"]["nodePools"][0]["podTemplate"] = template | ({} if spec is None else {"spec": spec})
        [group] = rendered(cluster_manifest)["RayCluster"]["spec"]["workerGroupSpecs"]
        return group["template"]

    return pod


@pytest.fixture
def refused(pod):
    """The problems of an override."""

    def refused(spec=None, **template):
        with pytest.raises(SpecError) as caught:
            pod(spec, **template)
        return [str(error) for error in caught.value.errors]

    return refused


def test_mappings_merge_and_other_lists_are_replaced(pod, cluster_manifest):
    cluster_manifest["spec"]["nodePools"][0] |= {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "a"}]}
    template = pod(
        {"nodeSelector": {"zone": "b"}, "tolerations": [{"key": "b"}], "hostAliases": [{"ip": "10.0.0.1"}]},
        metadata={"labels": {"env": "prod"}, "annotations": {"note": "x"}},
    )
    spec = template["spec"]
    assert spec["nodeSelector"] == {"gpu": "h100", "zone": "b"}
    assert spec["tolerations"] == [{"key": "b"}]
    assert spec["hostAliases"] == [{"ip": "10.0.0.1"}]
    assert template["metadata"]["annotations"] == {"note": "x"}
    assert template["metadata"]["labels"].items() >= {"env": "prod", "rlhf-operator.io/job": "job"}.items()


def test_containers_merge_by_name_and_their_named_items_take_the_place_of_ours(pod):
    container = {
        "name": "ray",
        "imagePullPolicy": "Never",
        "env": [{"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}, {"name": "NEW"}],
        "volumeMounts": [{"name": "rlhf-tmp", "mountPath": "/var/tmp"}, {"name": "fast", "mountPath": "/fast"}],
        "resources": {"limits": {"ephemeral-storage": "1Ti"}},
    }
    volumes = [{"name": "fast", "ephemeral": {}}, {"name": "rlhf-scratch", "emptyDir": {"sizeLimit": "1Ti"}}]
    spec = pod({"containers": [container], "volumes": volumes})["spec"]
    [ray] = spec["containers"]
    env = {variable["name"]: variable for variable in ray["env"]}
    assert (ray["image"], ray["imagePullPolicy"]) == ("runtime:1", "Never")
    assert "value" not in env["HOME"]  # ours was one
    assert {"NEW", "RAY_USAGE_STATS_ENABLED"} <= env.keys()
    assert ray["resources"]["limits"].keys() == {"memory", "nvidia.com/gpu", "ephemeral-storage"}
    assert {"/tmp", "/var/tmp", "/fast"} <= {mount["mountPath"] for mount in ray["volumeMounts"]}
    assert {"name": "rlhf-scratch", "emptyDir": {"sizeLimit": "1Ti"}} in spec["volumes"]
    assert [volume["name"] for volume in spec["volumes"]][-1] == "fast"


def test_containers_of_a_users_own_come_after_rays_under_the_same_standard(pod):
    spec = pod({"containers": [{"name": "side", "image": "s"}], "initContainers": [{"name": "init", "image": "i"}]})
    assert [container["name"] for container in spec["spec"]["containers"]] == ["ray", "side"]
    ray, side = spec["spec"]["containers"]
    [init] = spec["spec"]["initContainers"]
    for field in ("securityContext", "terminationMessagePolicy"):
        assert side[field] == init[field] == ray[field]


def test_an_override_changes_nothing_of_the_manifest_or_of_other_pods(cluster_manifest, rendered, pod):
    before = rendered(cluster_manifest)["RayCluster"]["spec"]["headGroupSpec"]
    pod({"containers": [{"name": "ray", "env": [{"name": "HOME", "value": "/x"}]}], "securityContext": {"fsGroup": 5}})
    assert rendered(cluster_manifest)["RayCluster"]["spec"]["headGroupSpec"] == before


def test_who_changes_what_was_rendered_changes_nothing_that_is_rendered_later(cluster_manifest, rendered):
    made = rendered(cluster_manifest)["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    made["securityContext"]["runAsUser"] = made["containers"][0]["securityContext"]["capabilities"]["drop"] = None
    again = rendered(cluster_manifest)["RayCluster"]["spec"]["headGroupSpec"]["template"]["spec"]
    assert again["securityContext"]["runAsUser"] == 1000
    assert again["containers"][0]["securityContext"]["capabilities"]["drop"] == ["ALL"]


def ray(**fields):
    return {"containers": [{"name": "ray", **fields}]}


BREACHES = {
    "hostNetwork": {"hostNetwork": True},
    "hostPID": {"hostPID": True},
    "volumes[a].hostPath": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]},
    "securityContext.runAsUser": {"securityContext": {"runAsUser": 0}},
    "securityContext.runAsNonRoot": {"securityContext": {"runAsNonRoot": False}},
    "securityContext.seccompProfile.type": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "securityContext.sysctls[kernel.msgmax]": {"securityContext": {"sysctls": [{"name": "kernel.msgmax"}]}},
    "containers[ray].securityContext.privileged": ray(securityContext={"privileged": True}),
    "containers[ray].securityContext.allowPrivilegeEscalation": ray(securityContext={"allowPrivilegeEscalation": True}),
    "containers[ray].securityContext.capabilities.add": ray(securityContext={"capabilities": {"add": ["SYS_ADMIN"]}}),
    "containers[ray].securityContext.capabilities.drop": ray(securityContext={"capabilities": {"drop": ["CHOWN"]}}),
    "containers[ray].securityContext.procMount": ray(securityContext={"procMount": "Unmasked"}),
    "containers[ray].ports[p].hostPort": ray(ports=[{"name": "p", "containerPort": 1, "hostPort": 1}]),
    "containers[ray].livenessProbe.httpGet.host": ray(livenessProbe={"httpGet": {"host": "h", "port": 1}}),
    "initContainers[i].securityContext.runAsUser": {
        "initContainers": [{"name": "i", "securityContext": {"runAsUser": 0}}]
    },
}


@pytest.mark.parametrize("field", BREACHES)
def test_what_breaks_the_restricted_standard_is_refused_by_name(refused, field):
    [problem] = refused(BREACHES[field])
    assert problem.startswith(f"{POOL}.spec.{field}: got what the restricted Pod Security Standard forbids")


def test_pods_may_share_the_cpus_of_a_small_node(pod):
    [before] = pod()["spec"]["containers"]
    [after] = pod(ray(resources={"requests": {"cpu": "100m"}}))["spec"]["containers"]
    assert after["resources"]["requests"] == {**before["resources"]["requests"], "cpu": "100m"}
    assert after["resources"]["limits"] == before["resources"]["limits"]


DECIDED = {
    "spec.restartPolicy": {"restartPolicy": "Always"},
    "spec.automountServiceAccountToken": {"automountServiceAccountToken": True},
    "spec.nodeName": {"nodeName": "a"},
    "spec.volumes[0].name": {"volumes": [{"name": "rlhf-config", "emptyDir": {}}]},
    "spec.volumes[0].projected.sources[1].serviceAccountToken": {
        "volumes": [{"name": "v", "projected": {"sources": [{"secret": {}}, {"serviceAccountToken": {"path": "t"}}]}}]
    },
    "spec.containers[0].env[0].name": ray(env=[{"name": "RAY_AUTH_MODE", "value": "disabled"}]),
    "spec.containers[0].volumeMounts[0].mountPath": ray(volumeMounts=[{"name": "rlhf-tmp", "mountPath": "/etc"}]),
    "spec.containers[0].ports[0]": ray(ports=[{"name": "x", "containerPort": 8265}]),
    "spec.containers[0].resources.limits.nvidia.com/gpu": ray(resources={"limits": {"nvidia.com/gpu": 1}}),
    "spec.containers[0].resources.limits.cpu": ray(resources={"limits": {"cpu": 1}}),
    "spec.containers[0].resources.requests.memory": ray(resources={"requests": {"memory": "1Gi"}}),
}


@pytest.mark.parametrize("field", DECIDED)
def test_what_the_operator_decides_is_refused_by_name(refused, field):
    [problem] = refused(DECIDED[field])
    assert problem.startswith(f"{POOL}.{field}: got ")


@pytest.mark.parametrize("projected", [{"sources": [{"configMap": {"name": "c"}}]}, {"sources": "x"}, {}, "x"])
def test_other_projected_volumes_are_the_users_own(pod, projected):
    volume = {"name": "v", "projected": projected}
    spec = pod({"volumes": [volume], "serviceAccountName": "reader"})["spec"]
    assert (spec["volumes"][-1], spec["serviceAccountName"]) == (volume, "reader")


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"metadata": {"labels": {"rlhf-operator.io/job": "other"}}}, "metadata.labels.rlhf-operator.io/job"),
        ({"metadata": {"labels": {"ray.io/cluster": "other"}}}, "metadata.labels.ray.io/cluster"),
        ({"kind": "Pod"}, "kind"),
        ({"spec": []}, "spec"),
        ({"metadata": "x"}, "metadata"),
        ({"spec": {"containers": None}}, "spec.containers"),
        ({"spec": {"containers": {"name": "ray"}}}, "spec.containers"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0]"),
        ({"spec": {"containers": ["ray"]}}, "spec.containers[0]"),
        ({"spec": {"initContainers": "x"}}, "spec.initContainers"),
        ({"spec": {"containers": [{"name": "ray", "env": [{}]}]}}, "spec.containers[0].env[0]"),
        ({"spec": {"securityContext": []}}, "spec.securityContext"),
    ],
)
def test_what_is_no_pod_template_is_refused_by_name(refused, template, path):
    [problem] = refused(**template)
    assert problem.startswith(f"{POOL}.{path}: got ")


def test_all_problems_of_all_overrides_are_told_at_once(cluster_manifest, refused):
    cluster_manifest["spec"]["head"] = {"podTemplate": {"spec": {"hostNetwork": True}}}
    problems = refused({"hostIPC": True, "nodeName": "x"})
    paths = [problem.split(":")[0] for problem in problems]
    assert paths == ["spec.head.podTemplate.spec.hostNetwork", f"{POOL}.spec.hostIPC", f"{POOL}.spec.nodeName"]
