"""Writes JSON schemas where kubeconform looks for them, FOLDER/kind-group-version.json.

Those of Kubernetes itself are the ones that kubernetes-validate brings along, those of other kinds come from their
CustomResourceDefinitions.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

METADATA = {"apiVersion": "string", "kind": "string", "metadata": "object"}


def closed(schema: Any) -> Any:
    """The schema as the API server reads it: a field that is not named is dropped, so here it is refused."""
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


def export_kubernetes(version: str, folder: Path) -> None:
    """Write the schemas of Kubernetes' own kinds; what they share is found beside them."""
    source = Path(kubernetes_validate.__path__[0]) / "kubernetes-json-schema" / f"v{version}-local-strict"
    for file in source.glob("*.json"):
        schema = json.loads(file.read_text().replace('"/api/_definitions.json', '"_definitions.json'))
        schema.pop("$id", None)  # a web address, against which kubeconform would read the references
        (folder / file.name).write_text(json.dumps(schema))


def main() -> None:
    """Write the schemas of Kubernetes, and of the definitions that were named."""
    parser = argparse.ArgumentParser(description="Write JSON schemas where kubeconform looks for them.")
    parser.add_argument("folder", type=Path, help="where to")
    parser.add_argument("--kubernetes", default="1.34.0", help="version of Kubernetes' own schemas")
    parser.add_argument("definitions", type=Path, nargs="+", help="files, a CustomResourceDefinition each")
    args = parser.parse_args()
    export_kubernetes(args.kubernetes, args.folder)
    for file in args.definitions:
        export(yaml.load(file.read_bytes(), yaml.CSafeLoader), args.folder)


if __name__ == "__main__":
    main()
