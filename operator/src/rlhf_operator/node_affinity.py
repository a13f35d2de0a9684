"""Which nodes a pod's required node affinity lets it onto, by Kubernetes' rules. Pure."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Test = Callable[[str | None, Sequence[str]], bool]


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def _above(sign: int) -> Test:
    def test(value: str | None, values: Sequence[str]) -> bool:
        have, bound = _number(value), _number(values[0] if values else None)
        return have is not None and bound is not None and sign * have > sign * bound

    return test


OPERATORS: Mapping[str, Test] = {
    "In": lambda value, values: value is not None and value in values,
    "NotIn": lambda value, values: value not in values,
    "Exists": lambda value, values: value is not None,
    "DoesNotExist": lambda value, values: value is None,
    "Gt": _above(1),
    "Lt": _above(-1),
}
"""What is asked of a label, which is None where a node does not have it."""


def lets_onto(affinity: Mapping[str, Any] | None, name: str, labels: Mapping[str, str]) -> bool:
    """Whether a node meets what an affinity requires of nodes; what it prefers, and other pods, are left aside.

    Args:
        affinity: as it stands in a pod. What the API server would refuse of it counts as met: it is not judged here.
        name: the node's.
        labels: the node's.
    """
    required = _mapping(_mapping(affinity).get("nodeAffinity")).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = _mapping(required).get("nodeSelectorTerms")
    if not isinstance(terms, list):
        return True
    return any(_term_holds(_mapping(term), name, labels) for term in terms)


def _term_holds(term: Mapping[str, Any], name: str, labels: Mapping[str, str]) -> bool:
    """Whether all that a term asks for holds; one that asks for nothing never does."""
    asked = [(wish, labels) for wish in term.get("matchExpressions") or ()]
    asked += [(wish, {"metadata.name": name}) for wish in term.get("matchFields") or ()]
    return bool(asked) and all(_wish_holds(_mapping(wish), have) for wish, have in asked)


def _wish_holds(wish: Mapping[str, Any], have: Mapping[str, str]) -> bool:
    test = OPERATORS.get(str(wish.get("operator")))
    return test is None or test(have.get(str(wish.get("key"))), wish.get("values") or ())


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
