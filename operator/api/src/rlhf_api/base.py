"""What every model of the contract shares."""

import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    """3.0 and 1e3 as the whole numbers that they are in JSON, which the API server makes of them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**63), le=2**63 - 1)]
"""A whole number of 64 bits, however it is written: 3, 3.0 or 3e0."""
PositiveInt = Annotated[Integer, Field(ge=1)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0.01, le=2)]
"""What vLLM samples at: it makes 0.01 of one nearer to 0 without an error, and refuses one above 2."""
Fraction = Annotated[float, Field(ge=0, le=1)]
DNS_1123 = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_1035 = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
DnsLabel = Annotated[str, Field(pattern=DNS_1123, max_length=63)]
"""A DNS-1123 label, the form Kubernetes asks of most names."""
DNS_SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
DnsSubdomain = Annotated[str, Field(pattern=DNS_SUBDOMAIN, max_length=253)]
"""A DNS-1123 subdomain, the form of names of Secrets, ConfigMaps, claims and classes."""
LabelValue = Annotated[str, Field(pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", max_length=63)]
LabelValues = Annotated[dict[str, LabelValue], Field(max_length=64)]
"""Kubernetes labels."""


JsonSchema = dict[str, Any]
"""A JSON schema, or a part of one."""


class ApiModel(BaseModel):
    """A frozen, strict model: camelCase in YAML and JSON, unknown fields refused.

    Strict means that a quoted number is not a number, as the API server sees it too.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    planned: ClassVar[frozenset[str]] = frozenset()
    """Fields of the design, by their YAML names, whose feature is not there yet: refused as not supported.

    `field: value` marks one value of a field in the same way.
    """


def field_problem(got: str, expected: str, fix: str) -> PydanticCustomError:
    """A validation error that carries the three parts of a `FieldError`."""
    return PydanticCustomError(
        "rlhf", "got {got}; expected {expected}. Fix: {fix}", {"got": got, "expected": expected, "fix": fix}
    )


def require_json(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse a mapping that would not survive as JSON: a date, an infinite number, a cycle."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        got, fix = f"a mapping that JSON cannot hold ({error})", "quote dates, and write finite numbers"
        raise field_problem(got, "texts, numbers, lists and mappings", fix) from None
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(require_json)]
"""A mapping of the user's own fields: whatever YAML and JSON have in common, since the runtime gets it as JSON."""


def require_exactly_one(given: Iterable[str], allowed: Iterable[str]) -> None:
    """Refuse a mapping in which not exactly one of the allowed alternatives was given.

    Raises:
        PydanticCustomError: naming what was given and what may be.
    """
    given, allowed = list(given), list(allowed)
    if len(given) == 1:
        return
    fix = f"keep one of {', '.join(given)}" if given else f"add one of {', '.join(allowed)}"
    raise field_problem(" and ".join(given) or "none of them", f"exactly one of {', '.join(allowed)}", fix)
