"""How an override is laid over a rendered pod template.

1. Mappings merge, key by key.
2. Containers merge by name. Of a pod's volumes and secrets and of a container's variables and ports an item takes the
   place of ours of the same name, and of its volume mounts the one of the same path. New ones are added at the end.
3. Every other value, lists included, takes the place of ours. Nothing is removed: there is no value that says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_api import FieldError

from rlhf_operator.manifests.base import Manifest


@dataclass(frozen=True)
class Fields:
    """Fields of a mapping whose values merge by more than rule 3."""

    mappings: Mapping[str, "Fields"] = field(default_factory=dict)
    """Mappings that have such fields themselves."""
    merged: Mapping[str, "Fields"] = field(default_factory=dict)
    """Lists whose items merge by `name`."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Lists of which items are replaced as a whole, and the key that tells an item."""


CONTAINER = Fields(replaced={"env": "name", "ports": "name", "volumeMounts": "mountPath"})
POD = Fields(
    merged={"containers": CONTAINER, "initContainers": CONTAINER},
    replaced={"volumes": "name", "imagePullSecrets": "name"},
)
TEMPLATE = Fields(mappings={"spec": POD})


def merge(
    base: Mapping[str, Any],
    override: Mapping[str, Any],
    path: str,
    errors: list[FieldError],
    fields: Fields = TEMPLATE,
) -> Manifest:
    """A mapping with an override laid over it; neither is changed.

    Args:
        base: what is rendered.
        override: what is laid over it.
        path: the override's place in the manifest.
        errors: where problems go: values of another kind than ours, items without their key.
        fields: how the mapping's fields merge.
    """
    made = dict(base)
    for key, value in override.items():
        here, ours = f"{path}.{key}", base.get(key)
        listed = key in fields.merged or key in fields.replaced
        form = "a list" if listed else _form(value if ours is None else ours)
        if value is None or _form(value) != form:
            errors.append(FieldError(here, _form(value), form, "write it as Kubernetes has it, or remove it"))
        elif listed:
            made[key] = _merged_items(ours or [], value, here, errors, fields)
        elif isinstance(value, dict):
            made[key] = merge(ours or {}, value, here, errors, fields.mappings.get(key, Fields()))
        else:
            made[key] = value
    return made


def _merged_items(
    ours: Sequence[Any], items: Sequence[Any], path: str, errors: list[FieldError], fields: Fields
) -> list[Any]:
    name = path.rpartition(".")[2]
    key, inner = fields.replaced.get(name, "name"), fields.merged.get(name)
    made = {item[key]: item for item in ours}
    for index, item in enumerate(items):
        here = f"{path}[{index}]"
        if not isinstance(item, dict) or not isinstance(item.get(key), str):
            fix = f"add it: items of {name} are told by it"
            errors.append(FieldError(here, f"an item without `{key}`", f"a mapping with `{key}`", fix))
        elif inner is None:
            made[item[key]] = item
        else:
            made[item[key]] = merge(made.get(item[key], {}), item, here, errors, inner)
    return list(made.values())


def _form(value: Any) -> str:
    """What kind of value it is, in the words of a manifest."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case _:
            return "a single value"
