"""Writes what of the chart follows from something else.

values.yaml and README.md follow from values.schema.json, files/crd.yaml is a copy of the CustomResourceDefinition.
`make chart` writes them; with `--check` what differs is named, and the exit code is 1.
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "rlhf-operator"
Schema = dict[str, Any]

VALUES_HEAD = "# Written by `make chart` from values.schema.json: every value, its meaning and its default.\n"
README = """\
# rlhf-operator

Runs `RLHFJob`s: reinforcement learning from feedback for language models, on Ray clusters made by KubeRay.

```console
helm install rlhf-operator charts/rlhf-operator --namespace rlhf-operator --create-namespace \\
  --set image.repository=REGISTRY/rlhf-operator
helm test rlhf-operator --namespace rlhf-operator
```

It needs Kubernetes 1.29 or newer and KubeRay 1.6, which is not part of the chart. Upgrades, rights, metrics and removal
are told in [docs/administration.md](../../docs/administration.md).

## Values

<!-- Written by `make chart` from values.schema.json. -->

| value | default | meaning |
| --- | --- | --- |
{rows}
"""


def settable(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The properties of a schema that stand in values.yaml; Helm's own `global` has no place there."""
    for name, inner in schema["properties"].items():
        if "properties" in inner or "default" in inner:
            yield name, inner


def values_yaml(schema: Schema, indent: str = "") -> str:
    """values.yaml: a comment and the default of every value."""
    lines: list[str] = []
    for name, inner in settable(schema):
        comment = textwrap.wrap(inner["description"], 110 - len(indent), break_on_hyphens=False)
        lines += [f"{indent}# {line}" for line in comment]
        if "properties" in inner:
            lines += [f"{indent}{name}:", values_yaml(inner, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {flow(inner['default'])}")
        if not indent:
            lines.append("")
    return "\n".join(lines).rstrip()


def flow(value: object) -> str:
    """A value on one line of YAML, in JSON's quoting of strings; keys of mappings are plain words here."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(flow(inner) for inner in value) + "]"
    return json.dumps(value)


def rows(schema: Schema, prefix: str = "") -> Iterator[str]:
    """A line of the README's table for each value."""
    for name, inner in settable(schema):
        if "properties" in inner:
            yield from rows(inner, f"{prefix}{name}.")
        else:
            meaning = inner["description"].replace("|", "\\|")
            yield f"| `{prefix}{name}` | `{flow(inner['default'])}` | {meaning} |"


def generated() -> dict[Path, str]:
    """What each generated file should hold."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    [crd] = (ROOT / "crds").glob("*.yaml")
    return {
        CHART / "values.yaml": VALUES_HEAD + "\n" + values_yaml(schema) + "\n",
        CHART / "README.md": README.format(rows="\n".join(rows(schema))),
        CHART / "files" / "crd.yaml": crd.read_text(),
    }


def main() -> int:
    """Write the files, or with `--check` only compare them."""
    parser = argparse.ArgumentParser(description="Write the generated files of the chart.")
    parser.add_argument("--check", action="store_true", help="only name what differs")
    check = parser.parse_args().check
    differing = [(file, text) for file, text in generated().items() if not file.exists() or file.read_text() != text]
    for file, text in differing:
        if not check:
            file.write_text(text)
    if check and differing:
        names = ", ".join(str(file.relative_to(ROOT)) for file, _ in differing)
        sys.stderr.write(f"{names}: not what `make chart` writes. Fix: run it\n")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
