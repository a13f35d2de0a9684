"""Errors for people: every problem of an input at once, each with its path and the way out."""

import difflib
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlhf_api.base import ApiModel


@dataclass(frozen=True)
class FieldError:
    """One problem of one field, printed as `path: got X; expected Y. Fix: Z`."""

    path: str
    """Where, in the words of the manifest: `spec.nodePools[0].gpusPerNode`."""
    got: str
    """What was found there."""
    expected: str
    """What would have been right."""
    fix: str
    """What to do about it."""

    def __str__(self) -> str:
        return f"{self.path}: got {self.got}; expected {self.expected}. Fix: {self.fix}"


class SpecError(Exception):
    """Bad input, with all of its problems."""

    def __init__(self, errors: Iterable[FieldError]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(str(error) for error in self.errors))


def field_errors(model: type[BaseModel], error: ValidationError) -> list[FieldError]:
    """Translate pydantic's errors about `model` into the house's form.

    An unknown field is told apart from one that is known but not supported yet, and the nearest known name is offered.
    """
    return [_translate(model, detail) for detail in error.errors(include_url=False)]


def _translate(model: type[BaseModel], detail: ErrorDetails) -> FieldError:
    loc = detail["loc"]
    path = format_path(loc)
    context = detail.get("ctx", {})
    got = _describe(detail["input"])
    match detail["type"]:
        case "rlhf":
            return FieldError(path, context["got"], context["expected"], context["fix"])
        case "extra_forbidden":
            return _unknown_field(model, loc)
        case "missing":
            return FieldError(path, "nothing", "a value", f"add `{loc[-1]}`")
        case "literal_error" | "enum":
            return FieldError(path, got, f"one of {context['expected']}", "use one of the listed values")
        case "float_type" | "int_type" if isinstance(detail["input"], str):
            return FieldError(path, got, "a number", "write the number without quotes")
        case _:
            expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
            return FieldError(path, got, expected[:1].lower() + expected[1:], f"correct `{path}`")


def _unknown_field(model: type[BaseModel], loc: Sequence[int | str]) -> FieldError:
    name = str(loc[-1])
    owner = _model_at(model, loc[:-1])
    planned = owner.planned if issubclass(owner, ApiModel) else frozenset()
    if name in planned:
        return FieldError(format_path(loc), f"`{name}`", "a supported field", f"remove `{name}`: it is not supported yet")
    known = sorted(field.alias or key for key, field in owner.model_fields.items())
    near = difflib.get_close_matches(name, [*known, *planned], n=1, cutoff=0.5)
    fix = f"did you mean `{near[0]}`?" if near else "remove it"
    return FieldError(format_path(loc), f"unknown field `{name}`", f"one of {', '.join(known)}", fix)


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The model that the path `loc` leads to, starting from `model`."""
    for part in loc:
        for key, field in model.model_fields.items():
            if part in (key, field.alias):
                model = _model_in(field.annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The first model named anywhere inside a type annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := _model_in(arg))), None)


def format_path(loc: Sequence[int | str]) -> str:
    """`("spec", "nodePools", 0)` as `spec.nodePools[0]`."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path or "the document"


def _describe(value: Any) -> str:
    """A value as a person wrote it, cut where it is long."""
    match value:
        case None:
            return "nothing"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case bool():
            return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
