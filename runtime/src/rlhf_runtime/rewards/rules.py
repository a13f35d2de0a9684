"""Shipped reward rules: plain functions with the signature that a user's own would have."""

from collections.abc import Sequence


def digit_share(prompts: Sequence[str], responses: Sequence[str], **_: object) -> list[float]:
    """Share of a response's characters that are the digits 0 to 9; 0 for an empty response."""
    return [sum(character in "0123456789" for character in text) / max(len(text), 1) for text in responses]


def exact_match(
    prompts: Sequence[str], responses: Sequence[str], *, answer: Sequence[object], **_: object
) -> list[float]:
    """1 where the response is the row's `answer`, white space around either aside, else 0."""
    return [float(text.strip() == str(right).strip()) for text, right in zip(responses, answer, strict=True)]


RULES = {"digit_share": digit_share, "exact_match": exact_match}
"""Rules by the name that a manifest gives them."""
