"""Prompts."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlhf_api.base import (
    ApiModel,
    Integer,
    PositiveInt,
    field_problem,
    require_exactly_one,
    require_json,
)


def _check_row(row: Any) -> Any:
    if not isinstance(row, str | dict):
        raise field_problem(repr(row), "a text or a mapping", "quote the prompt, or give a mapping with its fields")
    return require_json(row) if isinstance(row, dict) else row


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < 0.01:
        raise field_problem(f"{temperature:g}", "0, or at least 0.01, which vLLM would make of it", "use 0 or 0.01")
    return temperature


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


class Evaluation(ApiModel):
    """Held-out prompts, and how they are answered: nothing is trained on the answers, so these may be truncated."""

    prompts: Prompts
    """The prompts; `data.maxPromptLength` holds for them too."""
    every_steps: PositiveInt = 20
    """Steps from one evaluation to the next; there is one before the first step and one after the last, too."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt."""
    temperature: Annotated[float, Field(ge=0, le=2), AfterValidator(_check_temperature)] = 0.0
    """Sampling temperature: 0, which takes the likeliest token, or from 0.01 on."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    max_response_length: PositiveInt | None = None
    """Most tokens that are generated. Default: as in training."""

    @model_validator(mode="after")
    def _greedy_is_one_sample(self) -> Self:
        if self.temperature == 0 and (self.samples_per_prompt > 1 or self.top_p < 1):
            name = "samplesPerPrompt" if self.samples_per_prompt > 1 else "topP"
            expected = "it with a temperature above 0: at 0 all samples of a prompt are the likeliest one"
            raise field_problem(f"`{name}` with temperature 0", expected, f"raise `temperature`, or remove `{name}`")
        return self


class Data(ApiModel):
    """The prompts of a job and how they are batched."""

    prompts: Prompts
    """Training prompts."""
    evaluation: Evaluation | None = None
    """Held-out prompts that the policy is measured on now and then."""
    batch_size: PositiveInt = 64
    """Prompts a step. Samples a step are this times `rollout.samplesPerPrompt`."""
    max_prompt_length: PositiveInt = 256
    """Most tokens in a prompt; a longer one is refused before the job starts."""
    max_response_length: PositiveInt = 256
    """Most tokens that are generated."""
    seed: Integer = 0
    """Seed of the order of prompts and of sampling. A random model has a seed of its own; a value head starts at 0."""

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its response, in training and evaluation."""
        evaluated = (self.evaluation and self.evaluation.max_response_length) or 0
        return self.max_prompt_length + max(self.max_response_length, evaluated)
