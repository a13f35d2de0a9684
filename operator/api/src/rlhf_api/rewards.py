"""Where rewards come from."""

from typing import ClassVar, Self

from pydantic import model_validator

from rlhf_api.base import ApiModel, DnsLabel, require_exactly_one


class RewardFunction(ApiModel):
    """A Python function, called once a batch: `f(prompts, responses, **columns) -> list of numbers`.

    `prompts` and `responses` are lists of text; `columns` are the other fields of the data's rows, each a list of the
    same length.
    """

    name: str | None = None
    """A rule shipped in the runtime: `digit_share` or `exact_match`."""
    import_path: str | None = None
    """A function of yours as `package.module:function`."""

    @model_validator(mode="after")
    def _one_function(self) -> Self:
        require_exactly_one(
            (name for name, value in (("name", self.name), ("importPath", self.import_path)) if value is not None),
            ("name", "importPath"),
        )
        return self


class Reward(ApiModel):
    """One term of the reward: weight × score."""

    planned: ClassVar[frozenset[str]] = frozenset({"model", "remote"})

    name: DnsLabel
    """Its name in metrics."""
    weight: float = 1.0
    """Factor of the score in the total."""
    function: RewardFunction
    """What computes the score."""
