"""Where rewards come from."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, model_validator

from rlhf_api.base import ApiModel, DnsLabel, field_problem, require_exactly_one

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _check_import_path(value: str) -> str:
    if not _IMPORT_PATH.fullmatch(value):
        raise field_problem(repr(value), "`package.module:function`", "name the module, a colon, and the function")
    return value


ShippedReward = Literal["digit_share", "exact_match"]
"""Rules shipped in the runtime.

`digit_share`: share of a response's characters that are digits; `exact_match`: 1 where it is the row's `answer`.
"""


class RewardFunction(ApiModel):
    """A Python function, called once a batch: `f(prompts, responses, **columns) -> list of numbers`.

    `prompts` and `responses` are lists of text; `columns` are the other fields of the data's rows, each a list of the
    same length.
    """

    planned: ClassVar[frozenset[str]] = frozenset({"name: math_verify"})

    name: ShippedReward | None = None
    """A rule shipped in the runtime."""
    import_path: Annotated[str, AfterValidator(_check_import_path)] | None = None
    """A function of yours as `package.module:function`."""

    @model_validator(mode="after")
    def _one_function(self) -> Self:
        require_exactly_one(
            (name for name, value in (("name", self.name), ("importPath", self.import_path)) if value is not None),
            ("name", "importPath"),
        )
        return self


class RewardModel(ApiModel):
    """A sequence classifier with one output, which is the score of a prompt and its response."""

    path: str
    """A Hugging Face folder: config, safetensors and the classifier's own tokenizer."""
    format: Literal["text", "chat"] = "text"
    """What the classifier reads. `text`: the response right after the prompt; `chat`: a message of the user and one of
    the assistant, as the tokenizer's chat template writes them."""


class Reward(ApiModel):
    """One term of the reward: weight times score."""

    planned: ClassVar[frozenset[str]] = frozenset({"remote"})

    name: DnsLabel
    """Its name in metrics."""
    weight: float = 1.0
    """Factor of the score in the total."""
    function: RewardFunction | None = None
    """Python that computes the score."""
    model: RewardModel | None = None
    """A model that computes it."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = (("function", self.function), ("model", self.model))
        require_exactly_one((name for name, value in sources if value is not None), (name for name, _ in sources))
        return self
