"""Prompts."""

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from rlhf_api.base import ApiModel, PositiveInt, require_exactly_one


class Prompts(ApiModel):
    """Where prompts come from: exactly one of `path`, `builtin` and `inline`."""

    planned: ClassVar[frozenset[str]] = frozenset({"huggingFace"})

    path: str | None = None
    """A JSONL file: one JSON object a line."""
    builtin: Literal["arithmetic"] | None = None
    """A small set shipped in the runtime. `arithmetic`: sums of two digits with their answers."""
    inline: list[str | dict[str, Any]] | None = None
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
    """Seed of everything random in the job: order of prompts, sampling, value head."""
