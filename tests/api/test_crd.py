"""The CustomResourceDefinition as text: what an API server would refuse or misread. `tests/cluster` asks a real one."""

import copy
import json
import os
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rlhf_api import RLHFJob, SpecError
from rlhf_api.cel import ADJUSTABLE, IDENTITY, change_rules, rules
from rlhf_api.crd import custom_resource_definition, nodes_at
from rlhf_api.spec import RLHFJobSpec
from rlhf_operator.crd import crd_yaml
from rlhf_operator.plan import build_plan
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
FILE = ROOT / "crds" / "rlhfjobs.rlhf-operator.io.yaml"
CRD = custom_resource_definition()
[VERSION] = CRD["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def walk(node, path=""):
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from walk(inner, f"{path}.{name}".lstrip("."))
    for part in ("items", "additionalProperties"):
        if part in node:
            yield from walk(node[part], f"{path}[]" if part == "items" else f"{path}{{}}")


NODES = dict(walk(SCHEMA))


def test_the_file_is_what_the_models_say():
    assert FILE.read_text() == crd_yaml(), "run `make crds`"
    assert YAML(typ="safe", pure=True).load(FILE) == json.loads(json.dumps(CRD))


def test_it_is_small_enough_for_client_side_apply():
    assert len(json.dumps(CRD)) < 200 * 1024


def test_the_schema_is_structural():
    """The rules of apiextensions.k8s.io/v1: every node has a type, and alternatives hold no structure."""
    for path, node in NODES.items():
        unknown = node.get("x-kubernetes-preserve-unknown-fields")
        number_or_text = node.get("x-kubernetes-int-or-string")
        assert "type" in node or unknown or number_or_text, path
        assert not {"$ref", "$defs", "allOf", "oneOf", "not", "title", "const", "patternProperties"}.intersection(node)
        assert not (number_or_text and "type" in node), path
        assert ("anyOf" in node) == bool(number_or_text), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert node.get("additionalProperties") is not False, path
        assert isinstance(node.get("exclusiveMinimum", False), bool), path
        assert set(node.get("required", [])) <= set(node.get("properties", {})), path
        assert node.get("type") != "array" or "items" in node, path
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path
        if "default" in node:
            jsonschema.validate(node["default"], as_json_schema(node), jsonschema.Draft202012Validator)
        assert not (node.get("nullable") and "enum" in node), path


def test_what_is_raw_is_said_to_be():
    raw = [path for path, node in NODES.items() if node.get("x-kubernetes-preserve-unknown-fields")]
    assert {path.split(".")[-1] for path in raw} == {
        "affinity",
        "topologySpreadConstraints[]",
        "podTemplate",
        "config",
        "inline[]",
    }


def test_every_field_is_explained():
    bare = [path for path, node in NODES.items() if path != "metadata" and not path.endswith(("[]", "{}"))
            and not node.get("description")]  # fmt: skip
    assert bare == []
    assert all("\n" not in node.get("description", "") for node in NODES.values())


def test_columns_show_fields_that_the_status_has():
    columns = {column["name"]: column for column in VERSION["additionalPrinterColumns"]}
    assert [name for name, column in columns.items() if not column["priority"]] == [
        "Phase", "Step", "Reward", "GPUs", "Try", "Age"
    ]  # fmt: skip
    assert [name for name, column in columns.items() if column["priority"]] == [
        "Pools", "KL", "Tokens/s", "RayCluster", "Message"
    ]  # fmt: skip
    for name, column in columns.items():
        if name != "Age":
            [node] = nodes_at(SCHEMA, column["jsonPath"].removeprefix("."))
            assert node["type"] == column["type"]


def test_every_list_that_a_rule_looks_through_is_bounded():
    for path, node in NODES.items():
        if "x-kubernetes-validations" in node:
            for other, inner in NODES.items():
                inside = other.startswith(path) and "[]" in other.removeprefix(path)
                if inside and inner.get("x-kubernetes-validations"):
                    owner = other[: other.rindex("[]")]
                    assert "maxItems" in NODES[owner], owner


def test_every_rule_has_a_message_that_says_what_to_do():
    for rule in rules():
        assert "Fix: " in rule.message, rule
        assert rule.details is None or "Fix: " in rule.details


def test_a_field_of_the_spec_is_adjustable_or_guarded():
    [started, running, ended] = change_rules()
    for name, field in RLHFJobSpec.model_fields.items():
        written = f"self.spec.{field.alias or name} !="
        guarded = [written in rule.holds for rule in (running, ended)]
        if (field.alias or name) in ADJUSTABLE:
            assert guarded == [False, False]
        else:
            assert guarded == [(field.alias or name) not in IDENTITY, True]
    for path in IDENTITY:
        assert list(nodes_at(SCHEMA, f"spec.{path}"))
        assert f"self.spec.{path} !=" in started.holds


def as_json_schema(node):
    """A structural schema as a JSON schema: `nullable` and boolean bounds are OpenAPI's alone."""
    node = copy.deepcopy(node)
    kind = node.pop("type", None)
    if node.pop("nullable", False):
        kind = [kind, "null"] if kind else None
        if "anyOf" in node:
            node["anyOf"].append({"type": "null"})
    if kind:
        node["type"] = kind
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if node.pop(exclusive, False):
            node[exclusive] = node.pop(bound)
    for name, inner in node.get("properties", {}).items():
        node["properties"][name] = as_json_schema(inner)
    for part in ("items", "additionalProperties"):
        if part in node:
            node[part] = as_json_schema(node[part])
    return node


VALIDATOR = jsonschema.Draft202012Validator(as_json_schema(SCHEMA))


def defaulted(value, node):
    """A value as the API server completes it: defaults of what is absent, from the outside in."""
    if isinstance(value, dict) and "properties" in node:
        value = dict(value)
        for name, inner in node["properties"].items():
            if "default" in inner and (name not in value or (value[name] is None and not inner.get("nullable"))):
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                value[name] = defaulted(value[name], inner)
        return value
    if isinstance(value, list) and "items" in node:
        return [defaulted(item, node["items"]) for item in value]
    return value


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_schema_takes_every_example_and_completes_it_as_the_models_do(file):
    manifest = YAML(typ="safe", pure=True).load(file)
    assert list(VALIDATOR.iter_errors(manifest)) == []
    assert RLHFJob.from_cluster(defaulted(manifest, SCHEMA)) == RLHFJob.parse(manifest)


def test_defaults_are_those_of_the_models(manifest):
    assert RLHFJob.from_cluster(defaulted(manifest, SCHEMA)) == RLHFJob.parse(manifest)
    for algorithm in ("ppo", "grpo", "rloo", "reinforcePlusPlus"):
        manifest["spec"]["algorithm"] = {algorithm: {"kl": {"coefficient": 0.5}}}
        assert RLHFJob.from_cluster(defaulted(manifest, SCHEMA)) == RLHFJob.parse(manifest)
    assert defaulted(manifest, SCHEMA)["spec"]["rollout"]["temperature"] == 1.0


def test_what_an_api_server_adds_is_read_past(manifest):
    written = RLHFJob.parse(manifest)
    manifest["metadata"] |= {
        "uid": "u", "generation": 1, "managedFields": [], "creationTimestamp": "2026-01-01T00:00:00Z",
        "resourceVersion": "1", "ownerReferences": [],
    }  # fmt: skip
    manifest["status"] = {"phase": "Training"}
    assert RLHFJob.from_cluster(manifest) == written
    manifest["spec"]["trainng"] = {}
    with pytest.raises(SpecError, match=r"spec\.trainng"):
        RLHFJob.from_cluster(manifest)


@pytest.mark.parametrize("steps", [60, 60.0])
def test_whole_numbers_are_read_however_they_are_written(manifest, steps):
    manifest["spec"]["training"]["steps"] = steps
    assert RLHFJob.parse(manifest).spec.training.steps == 60
    assert list(VALIDATOR.iter_errors(manifest)) == []


@pytest.mark.parametrize("steps", [0.5, 2**63, "60", True])
def test_numbers_that_are_not_whole_are_refused_by_both(manifest, steps):
    manifest["spec"]["training"]["steps"] = steps
    with pytest.raises(SpecError):
        RLHFJob.parse(manifest)
    if steps != 2**63:  # of which JSON schema has no notion; the API server's `int64` has
        assert list(VALIDATOR.iter_errors(manifest))


TEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=8)
RAW = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)


def values(node):
    """What a node of the schema allows."""
    found = _values(node)
    return st.none() | found if node.get("nullable") else found


def _values(node):
    if "enum" in node:
        return st.sampled_from([value for value in node["enum"] if value is not None])
    if node.get("x-kubernetes-int-or-string"):
        return st.sampled_from([1, "2", "500m", "1.5Gi", "1e3"])
    match node.get("type"):
        case "object" if "properties" in node:
            required = {name: values(node["properties"][name]) for name in node.get("required", [])}
            optional = {name: values(inner) for name, inner in node["properties"].items() if name not in required}
            return st.fixed_dictionaries(required, optional=optional)
        case "object" if "additionalProperties" in node:
            return st.dictionaries(TEXTS, values(node["additionalProperties"]), max_size=2)
        case "object":
            return st.dictionaries(TEXTS, RAW, max_size=2)
        case "array":
            least = node.get("minItems", 0)
            return st.lists(values(node["items"]), min_size=least, max_size=min(node.get("maxItems", 9), least + 2))
        case "string" if "pattern" in node:
            return st.from_regex(node["pattern"], fullmatch=True).filter(
                lambda text: len(text) <= node.get("maxLength", 99) and not text.endswith("\n")
            )
        case "string":
            return st.text(min_size=node.get("minLength", 0), max_size=8)
        case "integer":
            return st.integers(node.get("minimum", -(2**40)), min(node.get("maximum", 2**40), 2**40))
        case "number":
            low, high = node.get("minimum", -1e6), node.get("maximum", 1e6)
            return st.floats(
                low, high, exclude_min=node.get("exclusiveMinimum", False),
                exclude_max=node.get("exclusiveMaximum", False),
            )  # fmt: skip
        case "boolean":
            return st.booleans()
    return TEXTS | st.dictionaries(TEXTS, RAW, max_size=2)


def manifests():
    spec = values(SCHEMA["properties"]["spec"])
    head = {"apiVersion": "rlhf-operator.io/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "job"}}
    return spec.map(lambda spec: head | {"spec": spec})


MANIFESTS = int(os.environ.get("RLHF_MANIFESTS", "200"))
"""How many changed manifests are tried."""
SLOW = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def refusals(manifest):
    """The kinds of pydantic's errors about a manifest."""
    try:
        RLHFJob.model_validate(manifest, by_alias=True, by_name=False)
    except ValidationError as error:
        return [(detail["type"], detail["loc"]) for detail in error.errors(include_url=False)]
    return []


@given(manifest=manifests())
@SLOW
def test_of_what_the_schema_takes_only_checks_between_fields_are_left_to_the_models(manifest):
    assert list(VALIDATOR.iter_errors(manifest)) == []
    assert {kind for kind, _ in refusals(manifest)} <= {"rlhf"}


def problems_of(manifest):
    """Every problem of a manifest, from its form to its placement."""
    try:
        build_plan(RLHFJob.parse(manifest), "runs/job")
    except SpecError as error:
        return error.errors
    return []


@given(data=st.data())
@settings(SLOW, max_examples=MANIFESTS)
def test_what_the_models_take_the_schema_takes(data):
    manifest = copy.deepcopy(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(manifest, data.draw)
    if problems := problems_of(manifest):
        assert all(problem.path and problem.fix for problem in problems)
    else:
        assert list(VALIDATOR.iter_errors(json.loads(json.dumps(manifest)))) == []


SEEDS = [YAML(typ="safe", pure=True).load(file) for file in EXAMPLES]
ODD = st.sampled_from(
    [None, True, 0, -1, 1.5, 2.0, 1e300, 2**70, "", "1", "a b", "500m", "5Gi", [], [1], {}, {"path": "/a"}, {"a": None}]
)


def mutate(manifest, draw):
    """Replace, remove or add one value anywhere in a manifest."""
    node = manifest["spec"]
    for _ in range(draw(st.integers(0, 5))):
        inner = [value for value in (node.values() if isinstance(node, dict) else node) if value and
                 isinstance(value, dict | list)]  # fmt: skip
        if not inner:
            break
        node = draw(st.sampled_from(inner))
    keys = sorted(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = draw(st.sampled_from(keys))
    if draw(st.booleans()):
        node[key] = copy.deepcopy(draw(ODD))
    elif isinstance(node, dict):
        fields = {path.split(".")[-1] for path in NODES if path.startswith("spec.")}
        node[draw(st.sampled_from(sorted(fields)))] = node.pop(key)
    else:
        node.append(copy.deepcopy(node[key]))
