"""`rlhf render`: the objects that the operator would apply, as YAML, without a cluster."""

import io
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from rlhf_operator.cli.problems import BAD_INPUT, told
from rlhf_operator.cluster_plan import plan_cluster
from rlhf_operator.manifest import read_manifest
from rlhf_operator.manifests import Manifest
from rlhf_operator.manifests import render as render_objects

_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def render(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="RLHFJob manifests", show_default=False)],
    default_image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="the image of jobs that name none", show_default=False)
    ] = None,
) -> None:
    """Print what the operator would apply for a job: its RayCluster, ConfigMap and NetworkPolicy."""
    right, objects = True, list[Manifest]()
    for file in files:
        try:
            with told(file):
                plan = plan_cluster(read_manifest(file), default_image)
                objects += render_objects(plan, owner=None, cluster=1).objects
                for note in plan.notes:
                    typer.echo(f"{file}: note: {note}", err=True)
        except typer.Exit:
            right = False
    if not right:
        raise typer.Exit(BAD_INPUT)
    typer.echo("---\n".join(map(_document, objects)), nl=False)


class _Representer(RoundTripRepresenter):
    """Texts in quotes wherever a reader of YAML 1.1, which kubectl is, might take them for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value where it stands."""
        return True

    def text(self, data: str) -> ScalarNode:
        """A text: many lines as such, the others plain or in quotes."""
        plain = _PLAIN.fullmatch(data) and data.lower() not in _WORDS
        style = "|" if "\n" in data else None if plain else '"'
        node: ScalarNode = self.represent_scalar("tag:yaml.org,2002:str", data, style=style)
        return node


_Representer.add_representer(str, _Representer.text)


def _document(rendered: Manifest) -> str:
    yaml, text = YAML(), io.StringIO()
    yaml.Representer = _Representer
    yaml.width = 10**6
    yaml.dump(rendered, text)
    return text.getvalue()
