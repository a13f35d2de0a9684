"""From pydantic's JSON schema of a model to the structural schema that a CustomResourceDefinition asks for.

Structural means that every node has a type, nothing refers to anything else, and nothing is `null` by type but by
`nullable`. Whatever the model accepts the result accepts; checks between fields stay with the model.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rlhf_api.base import JsonSchema

_COPIED = (
    "type",
    "enum",
    "pattern",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "x-kubernetes-int-or-string",
)
_ORDER = ("description", "type", "nullable", "default", "enum", "properties", "required", "items")
_INT64 = 2**63


def structural_schema(model: type[BaseModel]) -> JsonSchema:
    """The structural schema of a model: its fields by their YAML names, with descriptions and literal defaults."""
    schema = model.model_json_schema(by_alias=True)
    return _node(schema, schema.get("$defs", {}))


def _node(schema: JsonSchema, definitions: Mapping[str, JsonSchema]) -> JsonSchema:
    """One node of the schema, and with it all below."""
    if "$ref" in schema:
        target = definitions[schema["$ref"].removeprefix("#/$defs/")]
        return _node(target | {key: value for key, value in schema.items() if key != "$ref"}, definitions)
    if "anyOf" in schema and "x-kubernetes-int-or-string" not in schema:
        return _alternatives(schema, definitions)
    node = {key: schema[key] for key in _COPIED if key in schema} | _bounds(schema) | _description(schema)
    if "x-kubernetes-int-or-string" in schema:
        node["anyOf"] = schema["anyOf"]
    if "const" in schema:
        node["enum"] = [schema["const"]]
    if schema.get("default") is not None:
        node["default"] = _default(schema["default"])
    if "properties" in schema:
        node["properties"] = {name: _node(inner, definitions) for name, inner in schema["properties"].items()}
    elif schema.get("additionalProperties") is True:
        node["x-kubernetes-preserve-unknown-fields"] = True
    elif isinstance(values := schema.get("additionalProperties"), dict):
        node["additionalProperties"] = _node(values, definitions)
    if "items" in schema:
        node["items"] = _node(schema["items"], definitions)
    return {key: node[key] for key in sorted(node, key=lambda key: _ORDER.index(key) if key in _ORDER else 99)}


def _alternatives(schema: JsonSchema, definitions: Mapping[str, JsonSchema]) -> JsonSchema:
    """A node that is one of several types: a type or null becomes nullable, others are left to the model to check."""
    described = {key: value for key, value in schema.items() if key != "anyOf"}
    given = [inner for inner in schema["anyOf"] if inner.get("type") != "null"]
    if len(given) == 1:
        node = _node(given[0] | described, definitions) | {"nullable": True}
        # The API server takes null for no member of an enum, even where the enum has it.
        return node | {"pattern": f"^({'|'.join(node.pop('enum'))})$"} if "enum" in node else node
    return _description(schema) | {"x-kubernetes-preserve-unknown-fields": True}


def _description(schema: JsonSchema) -> JsonSchema:
    """A docstring without its line breaks."""
    return {"description": " ".join(schema["description"].split())} if "description" in schema else {}


def _bounds(schema: JsonSchema) -> JsonSchema:
    """Limits of a number, as OpenAPI 3.0 writes them. Pydantic says `ge` and `le` behind a validator of ours."""
    bounds: JsonSchema = {}
    for side, plain, exclusive, behind in (
        ("minimum", "minimum", "exclusiveMinimum", "ge"),
        ("maximum", "maximum", "exclusiveMaximum", "le"),
    ):
        bound = schema.get(plain, schema.get(exclusive, schema.get(behind)))
        if bound is None or abs(bound) >= _INT64 - 1:
            continue
        bounds[side] = bound
        if exclusive in schema:
            bounds[exclusive] = True
    if schema.get("type") == "integer":
        bounds["format"] = "int64"
    return bounds


def _default(value: Any) -> Any:
    """A default; that of a section is empty, since its fields have their own."""
    return {} if isinstance(value, dict) else value
