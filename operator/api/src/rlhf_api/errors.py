"""Errors for people: every problem of an input at once, each with its path and the way out."""

import difflib
import re
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rlhf_api.base import DNS_1035, DNS_1123, ApiModel

Location = tuple[int | str, ...]
"""A field's place as pydantic gives it."""


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
    loc, value, context = detail["loc"], detail["input"], detail.get("ctx", {})
    path, got = format_path(loc), _describe(value)
    match detail["type"]:
        case "rlhf":
            return FieldError(path, context["got"], context["expected"], context["fix"])
        case "extra_forbidden":
            return _unknown_field(model, loc)
        case "missing":
            return FieldError(path, "nothing", "a value", f"add `{loc[-1]}`")
        case "literal_error":
            return _unknown_value(model, loc, value, context["expected"])
        case "float_type" | "int_type" if isinstance(value, str):
            return FieldError(path, got, "a number", "write the number without quotes")
        case "float_type" | "int_type" | "int_from_float":
            return FieldError(path, got, "a whole number" if "int" in detail["type"] else "a number", "write a number")
        case "bool_type":
            return FieldError(path, got, "true or false", "write true or false without quotes")
        case "string_type":
            fix = "give a text" if isinstance(value, dict | list | None) else "put it in quotes"
            return FieldError(path, got, "a text", fix)
        case "model_type" | "dict_type":
            return FieldError(path, got, "a mapping", "indent its fields below it" if loc else "write an RLHFJob")
        case "list_type":
            return FieldError(path, got, "a list", "write it as a list: one `- ` an item, or in brackets")
        case "too_short" | "too_long":
            bound = context.get("min_length", context.get("max_length"))
            least, many = detail["type"] == "too_short", f"{context['actual_length']} of them"
            return FieldError(
                path, many, f"at {'least' if least else 'most'} {bound}", "add some" if least else "remove some"
            )
        case "invalid_key":
            return FieldError(path, got, "a name", "write the field's name as text")
        case "string_pattern_mismatch":
            return FieldError(path, got, _pattern(context["pattern"]), "choose such a text")
        case _:
            return FieldError(path, got, _wording(detail["msg"]), "give such a value")


def _pattern(pattern: str) -> str:
    """A pattern of the contract in words."""
    words = {
        DNS_1123: "lower-case letters, digits and `-`, with a letter or digit first and last",
        DNS_1035: "lower-case letters, digits and `-`, with a letter first and a letter or digit last",
        "^/": "an absolute path",
    }
    return words.get(pattern, f"a text that matches {pattern}")


def _wording(message: str) -> str:
    """Pydantic's "Input should be less than 1" as what was expected: "a value less than 1"."""
    starts = {"Input should be a": "a", "Input should be ": "a value ", "String should have ": "a text of "}
    start = next((start for start in starts if message.startswith(start)), message[:1])
    return starts.get(start, start.lower()) + message.removeprefix(start)


def _unknown_value(model: type[BaseModel], loc: Location, value: Any, listed: str) -> FieldError:
    path, expected = format_path(loc), f"one of {listed}" if " or " in listed else listed
    if f"{loc[-1]}: {value}" in _model_at(model, loc[:-1]).planned:
        return FieldError(path, _describe(value), expected, f"use {expected}: {value} is not supported yet")
    near = difflib.get_close_matches(str(value), re.findall("'(.*?)'", listed), n=1, cutoff=0.5)
    return FieldError(path, _describe(value), expected, f"did you mean '{near[0]}'?" if near else f"use {expected}")


def _unknown_field(model: type[BaseModel], loc: Location) -> FieldError:
    name, owner = str(loc[-1]), _model_at(model, loc[:-1])
    if name in owner.planned:
        fix = f"remove `{name}`: it is not supported yet"
        return FieldError(format_path(loc), f"`{name}`", "a supported field", fix)
    known = sorted(field.alias or key for key, field in owner.model_fields.items())
    planned = (field for field in owner.planned if ":" not in field)
    near = difflib.get_close_matches(name, [*known, *planned], n=1, cutoff=0.5)
    fix = f"did you mean `{near[0]}`?" if near else "remove it"
    return FieldError(format_path(loc), f"unknown field `{name}`", f"one of {', '.join(known)}", fix)


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[ApiModel]:
    """The model that the path `loc` leads to, starting from `model`."""
    for part in loc:
        fields = model.model_fields.items()
        annotation = next((field.annotation for key, field in fields if part in (key, field.alias)), None)
        model = _model_in(annotation) or model
    return model if issubclass(model, ApiModel) else ApiModel


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
