"""The algorithms and their constants, named as the papers name them.

What algorithms share stands in `PolicyGradient` and `KL` once; each algorithm overrides the defaults that its paper or
its field has otherwise. `docs/algorithms.md` gives the formulas.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_api.base import (
    ApiModel,
    Fraction,
    Integer,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_problem,
    require_exactly_one,
)
from rlhf_api.roles import ROLES, Role

KLEstimator = Literal["k1", "k2", "k3"]
LossAggregation = Literal["tokenMean", "sequenceMeanTokenMean", "sequenceMeanTokenSum", "constant"]
AlgorithmName = Literal["ppo", "grpo", "rloo", "reinforcePlusPlus"]

ALGORITHMS: tuple[AlgorithmName, ...] = ("ppo", "grpo", "rloo", "reinforcePlusPlus")


class ClipRange(ApiModel):
    """The trust region of the probability ratio: clipped to [1 - low, 1 + high]."""

    low: Fraction = 0.2
    """How far the ratio may fall below 1."""
    high: PositiveFloat = 0.2
    """How far the ratio may rise above 1; DAPO's clip-higher is 0.28."""


class AdaptiveKL(ApiModel):
    """A coefficient that steers the KL to a target (Ziegler et al., 2019)."""

    target: PositiveFloat
    """KL to hold, in nats a token: the metric `kl`."""
    horizon: PositiveInt = 10000
    """Samples over which the coefficient may change by a fifth."""


class KL(ApiModel):
    """The penalty on moving away from the reference."""

    coefficient: NonNegativeFloat = 0.001
    """Weight of the penalty; at 0 a job needs no reference."""
    estimator: KLEstimator = "k1"
    """k1: the log-ratio; k2: half its square; k3: exp(-r) - 1 + r (Schulman, Approximating KL Divergence, 2020)."""
    location: Literal["reward", "loss"] = Field(default="reward", alias="in")
    """`reward`: subtracted from each token's reward; `loss`: added to the policy loss."""
    adaptive: AdaptiveKL | None = None
    """Steer the coefficient from step to step; null keeps it."""
    exponent_clamp: Annotated[float, Field(gt=0, le=20)] = 10.0
    """Largest exponent in k3."""
    value_clamp: PositiveFloat | None = None
    """Largest size of a token's estimate; null leaves it as it is."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.location == "loss" and self.estimator == "k1":
            fix = "use `estimator: k2`, whose gradient is the KL's own, or `in: reward`"
            raise field_problem("k1 in the loss, whose gradient is 0 on average", "k2 or k3 in the loss", fix)
        if self.adaptive and self.location == "loss":
            raise field_problem("`adaptive` with `in: loss`", "a fixed coefficient in the loss", "use `in: reward`")
        if self.adaptive and self.coefficient == 0:
            fix = "start from a positive coefficient, or remove `adaptive`"
            raise field_problem("`adaptive` with coefficient 0, which it only multiplies", "a positive one", fix)
        return self

    @property
    def in_loss(self) -> bool:
        """Whether the policy loss has a KL term."""
        return self.location == "loss" and self.coefficient > 0


class GRPOKL(KL):
    """GRPO's KL: k3 in the loss (DeepSeekMath, section 4.1)."""

    coefficient: NonNegativeFloat = 0.04
    """Weight of the penalty; at 0 a job needs no reference."""
    estimator: KLEstimator = "k3"
    """k1: the log-ratio; k2: half its square; k3: exp(-r) - 1 + r (Schulman, Approximating KL Divergence, 2020)."""
    location: Literal["reward", "loss"] = Field(default="loss", alias="in")
    """`reward`: subtracted from each token's reward; `loss`: added to the policy loss."""


class RLOOKL(KL):
    """RLOO's KL: k1 in the reward, of the size that TRL has."""

    coefficient: NonNegativeFloat = 0.05
    """Weight of the penalty; at 0 a job needs no reference."""


class ReinforceKL(KL):
    """REINFORCE++'s KL: k1 in the reward."""

    coefficient: NonNegativeFloat = 0.01
    """Weight of the penalty; at 0 a job needs no reference."""


class PolicyGradient(ApiModel):
    """What every algorithm has: the clipped policy loss of PPO and its passes over a batch."""

    clip_range: ClipRange = ClipRange()
    """Clip range of the policy loss."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that a token of negative advantage is weighed with (Ye et al., 2019); null sets no bound."""
    kl: KL = KL()
    """The KL penalty."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the entropy bonus in the policy loss."""
    epochs: PositiveInt = 1
    """Passes over each batch of experience."""
    mini_batch_size: PositiveInt | None = None
    """Samples an optimizer step, over all ranks. Default: the whole batch, so one step an epoch."""
    loss_aggregation: LossAggregation = "tokenMean"
    """How the losses of tokens become one: their mean; the mean over samples of each one's mean or sum; or the sum over
    `lossConstant`."""
    loss_constant: PositiveFloat | None = None
    """What `lossAggregation: constant` divides by. Default: miniBatchSize times maxResponseLength, as Dr. GRPO does."""
    whiten: bool = False
    """Scale the batch's advantages to mean 0 and variance 1 over tokens."""

    @model_validator(mode="after")
    def _constant_is_used(self) -> Self:
        if self.loss_constant is not None and self.loss_aggregation != "constant":
            fix = "use `lossAggregation: constant`, or remove `lossConstant`"
            got = f"`lossConstant` with `lossAggregation: {self.loss_aggregation}`"
            raise field_problem(got, "it with `constant` alone", fix)
        return self

    @property
    def compares_samples(self) -> bool:
        """Whether advantages come from comparing the samples of a prompt, of which there must be several."""
        return False


class PPO(PolicyGradient):
    """Proximal policy optimization (Schulman et al., 2017) with a critic and GAE (Schulman et al., 2015)."""

    gamma: Fraction = 1.0
    """Discount a token."""
    lambda_: Fraction = Field(default=0.95, alias="lambda")
    """GAE's mix of bias and variance."""
    value_clip_range: PositiveFloat | None = 0.2
    """How far a new value may move from the old one before its loss is clipped; null leaves values unclipped."""
    whiten: bool = True
    """Scale the batch's advantages to mean 0 and variance 1 over tokens."""


class DynamicSampling(ApiModel):
    """DAPO's dynamic sampling: groups whose samples all score the same are dropped and replaced by further prompts."""

    max_tries: Annotated[Integer, Field(ge=2)] = 10
    """Rollouts of `batchSize` prompts that a step may take to fill its batch, before the job ends with an error."""


class Overlong(ApiModel):
    """DAPO's soft overlong punishment: a penalty that grows over the last tokens before `maxResponseLength`."""

    buffer: PositiveInt
    """Tokens before `maxResponseLength` over which the penalty grows."""
    penalty: PositiveFloat = 1.0
    """What a response of `maxResponseLength` tokens loses."""


class GRPO(PolicyGradient):
    """Group relative policy optimization (Shao et al., 2024), with the parts of Dr. GRPO and DAPO as options."""

    kl: GRPOKL = GRPOKL()
    """The KL penalty."""
    loss_aggregation: LossAggregation = "sequenceMeanTokenMean"
    """How the losses of tokens become one: their mean; the mean over samples of each one's mean or sum; or the sum over
    `lossConstant`."""
    normalize_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards; Dr. GRPO does not."""
    dynamic_sampling: DynamicSampling | None = None
    """Train on groups with signal alone (DAPO)."""
    overlong: Overlong | None = None
    """Punish responses that come near the length limit (DAPO)."""

    @property
    def compares_samples(self) -> bool:
        """Always."""
        return True


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (Ahmadian et al., 2024): each sample against the mean of the prompt's others."""

    kl: RLOOKL = RLOOKL()
    """The KL penalty."""
    loss_aggregation: LossAggregation = "sequenceMeanTokenSum"
    """How the losses of tokens become one: their mean; the mean over samples of each one's mean or sum; or the sum over
    `lossConstant`."""

    @property
    def compares_samples(self) -> bool:
        """Always."""
        return True


class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++ (Hu et al., 2025): returns of whole responses, whitened over the batch instead of a critic."""

    kl: ReinforceKL = ReinforceKL()
    """The KL penalty."""
    baseline: bool = False
    """Subtract the mean reward of the prompt's samples first (REINFORCE++ with baseline)."""
    whiten: bool = True
    """Scale the batch's advantages to mean 0 and variance 1 over tokens."""

    @property
    def compares_samples(self) -> bool:
        """With the baseline."""
        return self.baseline


class Algorithm(ApiModel):
    """Exactly one algorithm."""

    ppo: PPO | None = None
    """PPO with a critic."""
    grpo: GRPO | None = None
    """GRPO, Dr. GRPO and DAPO."""
    rloo: RLOO | None = None
    """RLOO."""
    reinforce_plus_plus: ReinforcePlusPlus | None = None
    """REINFORCE++ and its form with baseline."""

    @model_validator(mode="after")
    def _one_algorithm(self) -> Self:
        require_exactly_one((name for name, value in self._by_name() if value is not None), ALGORITHMS)
        return self

    def _by_name(self) -> list[tuple[AlgorithmName, PolicyGradient | None]]:
        return list(zip(ALGORITHMS, (self.ppo, self.grpo, self.rloo, self.reinforce_plus_plus), strict=True))

    @property
    def name(self) -> AlgorithmName:
        """Which one it is."""
        return next(name for name, value in self._by_name() if value is not None)

    @property
    def settings(self) -> PolicyGradient:
        """That one's constants."""
        return next(value for _, value in self._by_name() if value is not None)

    def with_settings(self, settings: PolicyGradient) -> Self:
        """The same algorithm with other constants."""
        field = next(field for field in type(self).model_fields if getattr(self, field) is not None)
        return self.model_copy(update={field: settings})

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that it cannot run without."""
        spared: set[Role] = set() if self.ppo else {"critic"}
        if self.settings.kl.coefficient == 0:
            spared.add("reference")
        return tuple(role for role in ROLES if role not in spared)
