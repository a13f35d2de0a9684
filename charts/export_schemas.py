"""Writes the JSON schemas of CustomResourceDefinitions where kubeconform looks: FOLDER/kind-group-version.json."""

import argparse
import json
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML


def closed(schema: Any) -> Any:
    """The schema as the API server reads it: a field that is not named is dropped, so here it is refused.

    An object that Kubernetes embeds keeps its metadata, which is checked elsewhere.
    """
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: closed(inner) for key, inner in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        out.setdefault("additionalProperties", False)
    return out


def export(definition: dict[str, Any], folder: Path) -> None:
    """Write the schema of each version of a definition."""
    spec = definition["spec"]
    for version in spec["versions"]:
        schema = closed(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {name: {"type": kind} for name, kind in METADATA.items()}
        name = f"{spec['names']['kind']}-{spec['group'].split('.')[0]}-{version['name']}.json".lower()
        (folder / name).write_text(json.dumps(schema))


METADATA = {"apiVersion": "string", "kind": "string", "metadata": "object"}


def main() -> None:
    """Read the definitions that were named, and write their schemas."""
    parser = argparse.ArgumentParser(description="Write the JSON schemas of CustomResourceDefinitions.")
    parser.add_argument("folder", type=Path, help="where to")
    parser.add_argument("definitions", type=Path, nargs="+", help="files, a definition each")
    args = parser.parse_args()
    for file in args.definitions:
        export(YAML(typ="safe").load(file), args.folder)


if __name__ == "__main__":
    main()
