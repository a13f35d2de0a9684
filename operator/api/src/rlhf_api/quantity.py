"""Kubernetes quantities: `500m` CPUs, `512Gi` of memory."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

from rlhf_api.base import field_problem

QUANTITY_PATTERN = r"^\+?([0-9]+\.?[0-9]*|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
"""A quantity that is not negative, in every form that Kubernetes reads."""

MAX_LENGTH = 32
"""Characters of a quantity."""
MOST_CPUS = 1_000_000
"""CPUs of a node."""
MOST = 2**63 - 1
"""The largest quantity that Kubernetes holds."""

_FORM = re.compile(r"\+?(?P<number>[0-9]+\.?[0-9]*|\.[0-9]+)(?P<suffix>[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def quantity_value(quantity: int | str) -> Decimal:
    """The number that a quantity stands for: `500m` is 0.5, `2Ki` is 2048.

    Raises:
        ValueError: for a text that is no quantity.
    """
    form = _FORM.fullmatch(str(quantity))
    if form is None:
        raise ValueError(f"{quantity!r} is not a Kubernetes quantity")
    number, suffix = Decimal(form["number"]), form["suffix"] or ""
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    return number.scaleb(_DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:]))


def cpu_count(quantity: int | str) -> float:
    """CPUs in a quantity: `500m` is 0.5, `64` is 64."""
    return float(quantity_value(quantity))


def _parsed(value: Any) -> tuple[int | str, Decimal]:
    """A value as the API server holds it, and its number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float):
        fix = f'put it in quotes: "{value:g}"'
        raise field_problem(repr(value), "a whole number or a text, as the API server asks of quantities", fix)
    readable = isinstance(value, int | str) and not isinstance(value, bool) and len(str(value)) <= MAX_LENGTH
    if not (readable and _FORM.fullmatch(str(value)) and quantity_value(value) <= MOST):
        raise field_problem(repr(value), "a Kubernetes quantity", 'write a form such as "64", "500m" or "512Gi"')
    return value, quantity_value(value)


def _check_quantity(value: Any) -> Any:
    quantity, number = _parsed(value)
    if not number > 0:
        raise field_problem(repr(value), "a quantity above 0", 'write a form such as "512Gi"')
    return quantity


def _check_cpus(value: Any) -> Any:
    quantity, number = _parsed(value)
    if not 0 < number <= MOST_CPUS or number * 1000 % 1:
        expected = f"CPUs above 0, at most {MOST_CPUS:,}, no finer than a thousandth (`1m`)"
        raise field_problem(repr(value), expected, 'write a form such as "64" or "500m"')
    return quantity


_SCHEMA = WithJsonSchema(
    {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "minimum": 1,
        "pattern": QUANTITY_PATTERN,
        "maxLength": MAX_LENGTH,
        "x-kubernetes-int-or-string": True,
    }
)

Quantity = Annotated[int | str, BeforeValidator(_check_quantity), _SCHEMA]
"""A Kubernetes quantity above 0: a whole number, or a text such as `500m` or `512Gi`."""
Cpus = Annotated[int | str, BeforeValidator(_check_cpus), _SCHEMA]
"""A Kubernetes quantity of CPUs, such as 64, "64" or "500m"."""
