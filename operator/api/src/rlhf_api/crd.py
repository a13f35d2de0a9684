"""The CustomResourceDefinition of an RLHFJob, made from the models. Pure."""

from collections.abc import Iterator

from rlhf_api.base import JsonSchema
from rlhf_api.cel import rules
from rlhf_api.job import GROUP, VERSION
from rlhf_api.spec import RLHFJobSpec
from rlhf_api.status import RLHFJobStatus
from rlhf_api.structural import structural_schema

PLURAL = "rlhfjobs"
CRD_NAME = f"{PLURAL}.{GROUP}"

_KEYED_LISTS = {
    "spec.nodePools": "name",
    "spec.placement.groups": "name",
    "spec.rewards": "name",
    "spec.storage": "name",
    "spec.env": "name",
    "spec.head.env": "name",
    "spec.nodePools[].env": "name",
    "spec.imagePullSecrets": "name",
    "status.conditions": "type",
    "status.pools": "name",
}
"""Lists of which each item has a key of its own, by which two writers can share the list."""

_COLUMNS = (
    ("Phase", "string", ".status.phase", "Where the job is.", 0),
    ("Step", "integer", ".status.progress.step", "Steps done.", 0),
    ("Reward", "number", ".status.progress.reward", "Mean reward of the last step.", 0),
    ("GPUs", "integer", ".status.gpus", "GPUs of all pools together.", 0),
    ("Try", "integer", ".status.tries", "Tries so far.", 0),
    ("Age", "date", ".metadata.creationTimestamp", "Since when the job exists.", 0),
    ("Pools", "string", ".status.poolSummary", "Nodes that are ready of those that are wanted, by pool.", 1),
    ("KL", "number", ".status.progress.kl", "Mean KL to the reference of the last step.", 1),
    ("Tokens/s", "number", ".status.progress.tokensPerSecond", "Trained tokens a second.", 1),
    ("RayCluster", "string", ".status.rayCluster", "The current RayCluster.", 1),
    ("Message", "string", ".status.message", "The job's state in a sentence.", 1),
)


def custom_resource_definition() -> JsonSchema:
    """The whole object: schema, rules, printer columns, the status subresource."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "description": text, "priority": priority}
            for name, kind, path, text, priority in _COLUMNS
        ],
        "schema": {"openAPIV3Schema": _schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": "RLHFJob",
                "listKind": "RLHFJobList",
                "plural": PLURAL,
                "singular": "rlhfjob",
                "shortNames": ["rlhf"],
                "categories": ["all"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def nodes_at(schema: JsonSchema, path: str) -> Iterator[JsonSchema]:
    """The node of a schema at a path such as `spec.nodePools[].name`; none where the path leads nowhere."""
    node = schema
    for part in filter(None, path.replace("[]", ".[]").split(".")):
        inner = node.get("items") if part == "[]" else node.get("properties", {}).get(part)
        if inner is None:
            return
        node = inner
    yield node


def _schema() -> JsonSchema:
    schema: JsonSchema = {
        "description": "A job that trains a language model by reinforcement learning.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": f"Always {GROUP}/{VERSION}.", "type": "string"},
            "kind": {"description": "Always RLHFJob.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(RLHFJobSpec),
            "status": structural_schema(RLHFJobStatus),
        },
    }
    for path, key in _KEYED_LISTS.items():
        _only(schema, path).update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})
    _only(schema, "spec.placement.groups[].roles")["x-kubernetes-list-type"] = "set"
    for rule in rules():
        _only(schema, rule.path).setdefault("x-kubernetes-validations", []).append(rule.as_json())
    return schema


def _only(schema: JsonSchema, path: str) -> JsonSchema:
    """The node at a path.

    Raises:
        LookupError: where there is none: a rule or a list names a field that is gone.
    """
    node = next(nodes_at(schema, path), None)
    if node is None:
        raise LookupError(f"the schema has no {path}")
    return node
