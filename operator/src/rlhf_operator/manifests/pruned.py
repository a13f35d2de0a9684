"""What the CRD of an installed release would drop or refuse of a rendered object, told before it is lost in silence."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlhf_api import FieldError

from rlhf_operator.manifests.base import Manifest

Schema = Mapping[str, Any]

_FORMS: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_WORDS = {"object": "a mapping", "array": "a list", "string": "a text", "boolean": "true or false"}


def check_pruned(objects: Iterable[Manifest], crd: Manifest) -> list[FieldError]:
    """Fields of rendered objects that the API server would drop, or whose form it would refuse. Pure.

    Args:
        objects: rendered objects; those of other kinds are passed over.
        crd: the CustomResourceDefinition as it is installed.
    """
    kind, group = crd["spec"]["names"]["kind"], crd["spec"]["group"]
    served = {f"{group}/{version['name']}": version for version in crd["spec"]["versions"] if version["served"]}
    problems = list[FieldError]()
    for rendered in objects:
        if rendered["kind"] != kind:
            continue
        version = served.get(rendered["apiVersion"])
        if version is None:
            expected, fix = f"one of {', '.join(served)}", "install a KubeRay of the release that the docs name"
            problems.append(FieldError(f"{kind}.apiVersion", rendered["apiVersion"], expected, fix))
            continue
        schema = version["schema"]["openAPIV3Schema"]["properties"]
        problems += _lost(rendered["spec"], schema["spec"], f"{kind}.spec")
    return problems


def _lost(value: Any, schema: Schema, path: str) -> Iterator[FieldError]:
    form = schema.get("type")
    if form and not schema.get("x-kubernetes-int-or-string") and not _is(value, form):
        expected = _WORDS.get(form, "a number")
        yield FieldError(path, f"{value!r:.80}", expected, "write it as Kubernetes has it")
    elif isinstance(value, dict):
        yield from _lost_fields(value, schema, path)
    elif isinstance(value, list) and (items := schema.get("items")):
        for index, item in enumerate(value):
            yield from _lost(item, items, f"{path}[{index}]")


def _lost_fields(value: Mapping[str, Any], schema: Schema, path: str) -> Iterator[FieldError]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    for key, item in value.items():
        here = f"{path}.{key}"
        if key in known:
            yield from _lost(item, known[key], here)
        elif isinstance(others, dict):
            yield from _lost(item, others, here)
        elif not others and not schema.get("x-kubernetes-preserve-unknown-fields"):
            fix = "remove what asks for it, or install a KubeRay that has it"
            yield FieldError(here, f"`{key}`", "a field of the KubeRay that is installed", fix)


def _is(value: Any, form: str) -> bool:
    if isinstance(value, bool):
        return form == "boolean"
    return isinstance(value, _FORMS[form])
