"""The roles of a job and the models behind them."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf_api.base import ApiModel, Integer, JsonObject, require_exactly_one

Role = Literal["policy", "rollout", "critic", "reference", "reward"]
"""What a worker does. Policy, critic and reference compute with torch, rollout with vLLM, reward with Python."""

ROLES: tuple[Role, ...] = ("policy", "rollout", "critic", "reference", "reward")
TORCH_ROLES: frozenset[Role] = frozenset({"policy", "critic", "reference"})
"""Roles that share one process, and so one copy of the libraries and one GPU, when they share a group."""


class RandomModel(ApiModel):
    """A model made on the spot: the same seed gives the same weights on every machine."""

    architecture: str
    """Model type as transformers names it, such as `qwen2` or `llama`."""
    config: JsonObject = Field(default_factory=dict)
    """Fields of the architecture's transformers config; `vocab_size` and the special tokens come from the tokenizer."""
    tokenizer: Literal["ascii"] = "ascii"
    """A tokenizer shipped in the runtime. `ascii`: one token a printable ASCII character."""
    seed: Integer = 0
    """Seed of the weights."""


class ModelSource(ApiModel):
    """Where a model comes from: exactly one of `path` and `random`."""

    planned: ClassVar[frozenset[str]] = frozenset({"huggingFace", "lora"})

    path: str | None = None
    """A Hugging Face folder: config, safetensors and tokenizer."""
    random: RandomModel | None = None
    """Random weights from a config."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        require_exactly_one(
            (name for name, value in (("path", self.path), ("random", self.random)) if value is not None),
            ("path", "random"),
        )
        return self


class ReferenceSource(ApiModel):
    """The frozen model that KL is measured against: `path`, `random`, or neither for the policy's start."""

    planned: ClassVar[frozenset[str]] = frozenset({"huggingFace"})

    path: str | None = None
    """A Hugging Face folder."""
    random: RandomModel | None = None
    """Random weights from a config."""

    @model_validator(mode="after")
    def _at_most_one_source(self) -> Self:
        if self.path is not None and self.random is not None:
            require_exactly_one(("path", "random"), ("path", "random"))
        return self


class Models(ApiModel):
    """The models of a job. Critic and reference start as the policy does where nothing else is said."""

    policy: ModelSource
    """The model that is trained."""
    critic: ModelSource | None = None
    """The value model's backbone, for ppo alone; its value head starts at zero. Default: the policy's start."""
    reference: ReferenceSource | None = None
    """The frozen model of the KL term. Default: the policy's start."""
