"""What an administrator gets from the chart, as helm renders it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from rlhf_api import SpecError
from rlhf_operator.manifests import networkpolicy, ports
from rlhf_operator.settings import Settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rlhf-operator"
CI = sorted(file.name for file in (CHART / "ci").glob("*.yaml"))
CLUSTER_SCOPED = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace", "PriorityClass"}
Object = dict[str, Any]
Render = Callable[..., list[Object]]


def one(objects: list[Object], kind: str) -> Object:
    (found,) = [item for item in objects if item["kind"] == kind]
    return found


def pods(objects: list[Object]) -> Iterator[Object]:
    for item in objects:
        if item["kind"] in ("Pod", "Deployment"):
            yield item["spec"] if item["kind"] == "Pod" else item["spec"]["template"]["spec"]


def container(objects: list[Object]) -> Object:
    (found,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def schemas(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}", inner
        yield from schemas(inner, f"{path}{name}.")


def test_what_is_generated_is_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "charts" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_chart_and_the_operator_agree_on_settings_and_their_defaults():
    values = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    fields = {field: model for field, model in Settings.model_fields.items() if model}
    camel = {field.split("_")[0] + "".join(map(str.title, field.split("_")[1:])): field for field in fields}
    # These are the chart's own: the pod's ports, where it runs, and what `watchNamespaces` says.
    assert set(camel) - set(values) == {"namespaces", "viaProxy", "metricsPort", "healthPort"}
    assert set(values) <= set(camel)
    for name, schema in values.items():
        told = tuple(schema["default"]) if schema["type"] == "array" else schema["default"]
        assert (None if told == "" else told) == fields[camel[name]].default, name


@pytest.mark.parametrize("values", CI)
def test_the_operator_reads_every_variable_that_it_is_given(render: Render, values: str, monkeypatch):
    environment = {entry["name"]: entry["value"] for entry in container(render(values=values))["env"]}
    ours = {name.removeprefix("RLHF_OPERATOR_").lower() for name in environment if name.startswith("RLHF_OPERATOR_")}
    assert ours <= set(Settings.model_fields)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = Settings.read()
    if values == "namespaced-values.yaml":
        assert settings.namespaces == ("team-a", "team-b")
        assert settings.default_image == "registry.example/rlhf-runtime:0.1.0"
    if values == "everything-values.yaml":
        assert settings.api_server_cidrs == ("10.0.0.0/24", "fd00::/64", "192.0.2.7/32")
    if values == "default-values.yaml":
        assert settings == Settings.model_construct()


def test_an_empty_variable_is_as_none_and_one_that_cannot_be_read_is_named(monkeypatch):
    for name in ("NAMESPACES", "DEFAULT_IMAGE", "API_SERVER_CIDRS", "RESYNC_SECONDS"):
        monkeypatch.setenv(f"RLHF_OPERATOR_{name}", "")
    assert Settings.read() == Settings.model_construct()
    monkeypatch.setenv("RLHF_OPERATOR_API_SERVER_CIDRS", "10.0.0.0/24, 10.0.0.1/24")
    with pytest.raises(SpecError) as caught:
        Settings.read()
    [error] = caught.value.errors
    assert (error.path, error.got) == ("RLHF_OPERATOR_API_SERVER_CIDRS", "'10.0.0.1/24'")
    assert error.expected.startswith("a network such as")


@pytest.mark.parametrize("values", CI)
def test_every_object_is_valid(render: Render, values: str):
    for item in render(values=values):
        if item["kind"] != "ServiceMonitor":
            for version in ("1.29", "1.34"):
                kubernetes_validate.validate(item, version, strict=True)


def test_a_value_that_the_chart_does_not_know_is_refused(template):
    for path, schema in schemas(json.loads((CHART / "values.schema.json").read_text())):
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
    for unknown in ("replicas=2", "settings.resyncSecond=3", "image.tags=x", "networkPolicy.egress=true"):
        done = template("--set", unknown)
        assert done.returncode, unknown
        assert "not allowed" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        *("image.digest=sha256:1", "watchNamespaces={A}", "settings.maxConcurrent=0", "settings.logFormat=xml"),
        "settings.apiServerCidrs={apiserver}",
    ],
)
def test_a_value_out_of_bounds_is_refused(template, wrong: str):
    done = template("--set", wrong)
    assert done.returncode
    assert wrong.split("=")[0].split(".")[-1] in done.stderr


def test_with_namespaces_nothing_is_granted_outside_of_them(render: Render):
    objects = render('watchNamespaces=["team-a", "team-b"]')
    assert {item["kind"] for item in objects} & CLUSTER_SCOPED == {"CustomResourceDefinition"}
    bound = {item["metadata"]["namespace"] for item in objects if item["kind"] in ("Role", "RoleBinding")}
    assert bound == {"team-a", "team-b"}
    for item in objects:
        if item["kind"] == "RoleBinding":
            assert item["roleRef"]["kind"] == "Role"
            assert item["subjects"][0]["namespace"] == "ops"
        if item["kind"] == "Role":
            resources = {resource for rule in item["rules"] for resource in rule["resources"]}
            assert not resources & {"nodes", "namespaces", "customresourcedefinitions"}


def test_the_definition_stays_unless_asked_otherwise(render: Render):
    kept = one(render(), "CustomResourceDefinition")
    assert kept["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert kept["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    loose = one(render("crds.keep=false"), "CustomResourceDefinition")
    assert "helm.sh/resource-policy" not in loose["metadata"].get("annotations", {})
    assert loose["spec"] == kept["spec"]
    assert not [item for item in render("crds.install=false") if item["kind"] == "CustomResourceDefinition"]


@pytest.mark.parametrize("values", CI)
def test_pods_meet_the_restricted_standard(render: Render, values: str):
    found = list(pods(render(values=values)))
    assert len(found) == 2
    for pod in found:
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(set(volume) <= {"name", "emptyDir"} for volume in pod.get("volumes", []))
        (only,) = pod["containers"]
        assert only["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_there_is_never_a_second_operator(render: Render):
    spec = one(render(), "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def test_probes_and_service_meet_the_ports_that_the_operator_opens(render: Render):
    objects = render()
    listening = {port["name"]: port["containerPort"] for port in container(objects)["ports"]}
    settings = Settings.model_construct()
    assert listening == {"metrics": settings.metrics_port, "health": settings.health_port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container(objects)[probe]["httpGet"] == {"path": "/healthz", "port": "health"}
    offered = one(objects, "Service")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in offered} == listening


def test_a_job_lets_the_operator_in_and_the_operator_gets_out_to_it(render: Render):
    objects = render()
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert networkpolicy.OPERATOR_LABELS.items() <= labels.items()
    policy = one(objects, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    heads = policy["egress"][-1]
    assert {port["port"] for port in heads["ports"]} == {ports.DASHBOARD.number, ports.PROGRESS.number}


def test_the_operator_lets_the_test_pod_in_where_it_looks(render: Render):
    objects = render(values="everything-values.yaml")
    (tested,) = [item for item in objects if item["kind"] == "Pod"]
    by_name = {port["name"]: str(port["containerPort"]) for port in container(objects)["ports"]}
    open_ports = set()
    for rule in one(objects, "NetworkPolicy")["spec"]["ingress"]:
        wanted = [peer.get("podSelector", {}).get("matchLabels", {"": ""}) for peer in rule["from"]]
        if any(labels.items() <= tested["metadata"]["labels"].items() for labels in wanted):
            open_ports |= {by_name[port["port"]] for port in rule["ports"]}
    assert open_ports == set(re.findall(r":(\d+)/", tested["spec"]["containers"][0]["args"][0]))


@pytest.mark.parametrize("values", CI)
def test_names_and_selectors_fit(render: Render, values: str):
    objects = render(values=values)
    for item in objects:
        assert len(item["metadata"]["name"]) <= 253
        for value in item["metadata"].get("labels", {}).values():
            assert len(value) <= 63
    labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selector = one(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert one(objects, "Service")["spec"]["selector"] == selector
    (tested,) = [item for item in objects if item["kind"] == "Pod"]
    assert not selector.items() <= tested["metadata"]["labels"].items()
