"""Prompts."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from rlhf_api.base import ApiModel, PositiveInt, field_problem, require_exactly_one, require_json


def _check_row(row: Any) -> Any:
    if not isinstance(row, str | dict):
        raise field_problem(repr(row), "a text or a mapping", "quote the prompt, or give a mapping with its fields")
    return require_json(row) if isinstance(row, dict) else row


Row = Annotated[str | dict[str, Any], BeforeValidator(_check_row)]
"""One prompt written in the manifest."""


class Prompts(ApiModel):
    """Where prompts come from: exactly one of `path`, `builtin` and `inline`."""

    planned: ClassVar[frozenset[str]] = frozenset({"huggingFace"})

    path: str | None = None
    """A JSONL file: one JSON object a line."""
    builtin: Literal["arithmetic"] | None = None
    """A small set shipped in the runtime. `arithmetic`: sums of two digits with their answers."""
    inline: Annotated[list[Row], Field(min_length=1)] | None = None
    """Prompts in the manifest itself: texts, or objects like the lines of a JSONL file."""
    field: str = "prompt"
    """The field of a row that holds the prompt; the other fields are handed to reward functions."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = (("path", self.path), ("builtin", self.builtin), ("inline", self.inline))
        require_exactly_one((name for name, value in sources if value is not None), (name for name, _ in sources))
        return self


class Data(ApiModel):
    """The prompts of a job and how they are batched."""

    planned: ClassVar[frozenset[str]] = frozenset({"evaluation"})

    prompts: Prompts
    """Training prompts."""
    batch_size: PositiveInt = 64
    """Prompts a step. Samples a step are this times `rollout.samplesPerPrompt`."""
    max_prompt_length: PositiveInt = 256
    """Most tokens in a prompt; a longer one is refused before the job starts."""
    max_response_length: PositiveInt = 256
    """Most tokens that are generated."""
    seed: int = 0
    """Seed of the order of prompts and of sampling. A random model has a seed of its own; a value head starts at 0."""
