"""Writes the CustomResourceDefinition as YAML: `python -m rlhf_operator.crd > FILE`, which `make crds` calls."""

import io
import sys

from rlhf_api.crd import custom_resource_definition
from ruamel.yaml import YAML

_HEAD = "# Made by `make crds` from the models in operator/api; a test fails where the two differ.\n"


def crd_yaml() -> str:
    """The definition as a YAML document, the same from the same models."""
    yaml, text = YAML(), io.StringIO()
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    yaml.dump(custom_resource_definition(), text)
    return _HEAD + text.getvalue()


if __name__ == "__main__":
    sys.stdout.write(crd_yaml())
