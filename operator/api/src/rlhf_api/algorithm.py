"""The algorithm and its constants, named as the papers name them."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from rlhf_api.base import ApiModel, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, require_exactly_one

KLEstimator = Literal["k1", "k2", "k3"]


class ClipRange(ApiModel):
    """The trust region of the probability ratio: clipped to [1 - low, 1 + high]."""

    low: Fraction = 0.2
    """How far the ratio may fall below 1."""
    high: PositiveFloat = 0.2
    """How far the ratio may rise above 1."""


class KL(ApiModel):
    """The penalty on moving away from the reference."""

    coefficient: NonNegativeFloat = 0.001
    """Weight of the penalty."""
    estimator: KLEstimator = "k3"
    """k1: the log-ratio; k2: half its square; k3: exp(-r) - 1 + r (Schulman, Approximating KL Divergence, 2020)."""
    location: Literal["reward", "loss"] = Field(default="reward", alias="in")
    """`reward`: subtracted from each token's reward; `loss`: added to the policy loss."""


class PPO(ApiModel):
    """Proximal policy optimization (Schulman et al., 2017) with a critic and GAE (Schulman et al., 2015)."""

    gamma: Fraction = 1.0
    """Discount a token."""
    lambda_: Fraction = Field(default=0.95, alias="lambda")
    """GAE's mix of bias and variance."""
    clip_range: ClipRange = ClipRange()
    """Clip range of the policy loss."""
    value_clip_range: PositiveFloat | None = 0.2
    """How far a new value may move from the old one before its loss is clipped; null leaves values unclipped."""
    kl: KL = KL()
    """The KL penalty."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the policy loss."""
    epochs: PositiveInt = 1
    """Passes over each batch of experience."""
    mini_batch_size: PositiveInt | None = None
    """Samples an optimizer step, over all ranks. Default: the whole batch, so one step an epoch."""


ALGORITHMS = ("ppo", "grpo", "rloo", "reinforcePlusPlus")


class Algorithm(ApiModel):
    """Exactly one algorithm."""

    planned: ClassVar[frozenset[str]] = frozenset({"grpo", "rloo", "reinforcePlusPlus"})
    alternatives: ClassVar[frozenset[str]] = frozenset(ALGORITHMS)

    ppo: PPO
    """PPO with a critic."""

    @model_validator(mode="before")
    @classmethod
    def _one_algorithm(cls, data: Any) -> Any:
        given = [name for name in ALGORITHMS if name in data] if isinstance(data, dict) else []
        if len(given) > 1:
            require_exactly_one(given, ALGORITHMS)
        return data
