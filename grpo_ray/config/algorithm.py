"""The algorithm's configuration: the advantage of a reward, and the loss that the policy is trained on.

The names that fields choose among stand here alone; `grpo_ray.algorithms` implements each of them.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_ray.config.section import Decay, NonNegativeFloat, NonNegativeInt, Section

AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "max_only", "raw"]
Std = Literal["sample", "population"]
LossType = Literal["no_baseline", "reinforce_with_baseline", "unclipped", "grpo_clip", "gspo", "cispo"]
# The losses with a ratio to old log-probabilities.
RATIO_LOSSES: tuple[LossType, ...] = ("unclipped", "grpo_clip", "gspo", "cispo")
# The losses with one ratio per response, for which an advantage per token is that of the whole response.
RESPONSE_LOSSES: tuple[LossType, ...] = ("gspo",)
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
OldLogProbs = Literal["behaviour", "proximal"]
Correction = Literal["none", "truncate_token", "truncate_sequence", "mask_band"]
KLReference = Literal["none", "initial", "ema"]
KLEstimator = Literal["k1", "k2", "k3"]
# Epsilon below and above a ratio of 1, where it is not 0.2. CISPO's ratio is a weight, capped at 5 and with no
# floor: a floor would keep pushing down a token however improbable it has become.
CLIP_EPSILONS: dict[LossType, tuple[float, float]] = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


class KLConfig(Section):
    """KL divergence of the policy from a reference: measured, and with a coefficient part of the loss."""

    reference: KLReference = "none"
    """`initial`: a frozen copy of the initial weights; `ema`: a moving average of the policy's weights."""
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty in the loss (beta); 0 only measures."""
    estimator: KLEstimator = "k3"
    """Schulman's estimator used for the penalty. As a penalty k1 has no gradient on average, k2 has that of
    KL(policy || reference), and k3 that of KL(reference || policy)."""
    refresh_every_num_steps: PositiveInt | None = None
    """Copy the policy into the reference every N steps (`initial` only)."""
    ema_decay: Decay = 0.99
    """Share of its own weights that an `ema` reference keeps per step."""

    @model_validator(mode="after")
    def _consistent(self) -> "KLConfig":
        if self.coefficient and self.reference == "none":
            raise ValueError("coefficient needs a reference; set reference to `initial` or `ema`")
        if self.refresh_every_num_steps is not None and self.reference != "initial":
            raise ValueError("refresh_every_num_steps needs reference `initial`; an `ema` moves by itself")
        return self


class AlgorithmConfig(Section):
    num_steps: PositiveInt = 200
    """Training steps, each on one rollout batch (the handout's n_grpo_steps)."""
    prompts_per_step: PositiveInt = 32
    """Groups per step; multiplied by `samples_per_prompt`, the handout's rollout_batch_size."""
    samples_per_prompt: PositiveInt = 8
    """Completions per prompt, G (the handout's group_size)."""
    advantage: AdvantageKind = "mean_std"
    """Conversion of rewards to advantages. `mean_std`: minus the group's mean, divided by its standard
    deviation; `mean`: minus the mean; `leave_one_out`: minus the mean of the other completions (RLOO);
    `max_only`: 0 for all but the group's best; `raw`: unchanged."""
    std: Std = "sample"
    """Standard deviation of `mean_std`: `sample` divides the squares by G - 1, `population` by G."""
    advantage_eps: PositiveFloat = 1e-6
    """Added to the group's standard deviation."""
    loss: LossType = "grpo_clip"
    """Policy-gradient loss per token; `no_baseline` takes raw rewards, regardless of `advantage`."""
    cliprange: PositiveFloat | None = None
    """Epsilon: ratios are clipped to 1 - epsilon and 1 + epsilon; from 1 on there is no lower bound. Default:
    0.2; for `gspo`, with ratios averaged over a response, 3e-4 below and 4e-4 above; for `cispo`, with ratios
    that are weights, none below and 4 above."""
    cliprange_high: PositiveFloat | None = None
    """Separate epsilon for the upper bound (DAPO's clip-higher); default: that of `cliprange`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Upper bound on the ratio where the advantage is negative (dual-clip PPO; `grpo_clip` only); at least
    1 + the epsilon above."""
    aggregation: Aggregation | None = None
    """From token losses to one number. `sequence_mean`: mean over each response, then over responses;
    `token_mean`: mean over all tokens; `constant`: sum over each response divided by `sampling.max_tokens`,
    then mean over responses. Default: `token_mean` for `cispo`, `sequence_mean` for every other loss."""
    epochs_per_batch: PositiveInt = 1
    """Passes over each rollout batch (the handout's epochs_per_rollout_batch)."""
    train_batch_size: PositiveInt | None = None
    """Responses per optimizer update; default: the rollout batch, so one update per epoch."""
    old_log_probs: OldLogProbs = "behaviour"
    """Denominator of the ratio: logprobs assigned by the sampler (`behaviour`), or by the Learner before its
    first update on the batch (`proximal`; with one update per batch every ratio is then 1)."""
    off_policy_correction: Correction = "none"
    """Weights on token losses, proximal / behaviour: truncated per token, truncated per response, or 0 outside
    a band (`mask_band`, IcePop). A token without a sampler's logprob has weight 0, and is still counted."""
    correction_cap: PositiveFloat = 2.0
    """Largest truncated weight."""
    correction_band: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 5.0)
    """Smallest and largest weight that `mask_band` keeps."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the token entropies, which are maximised; they are aggregated like the loss."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Length of the zone before `sampling.max_tokens` in which each further token costs reward (DAPO's soft
    overlong punishment); 0 turns it off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reward subtracted at `sampling.max_tokens`; less within the zone, in proportion."""
    mask_truncated: bool = False
    """Do not train on responses cut off at `sampling.max_tokens` (their rewards still count in the group). They
    are left out of the loss's denominator as well."""
    dynamic_sampling_tries: NonNegativeInt = 0
    """Replace groups without signal by further prompts (DAPO), at most N batches of them per step."""
    oversample_frac: NonNegativeFloat = 0.0
    """Extra groups to keep in flight, as a share of the groups sampled per step; the last to finish are cut off
    and sampled again later."""
    kl: KLConfig = KLConfig()

    @property
    def advantage_kind(self) -> AdvantageKind:
        """The kind in effect: `no_baseline` takes raw rewards."""
        return "raw" if self.loss == "no_baseline" else self.advantage

    @property
    def loss_aggregation(self) -> Aggregation:
        """The aggregation in effect: CISPO's own (arXiv:2506.13585, Eq. 4) divides by tokens."""
        return self.aggregation or ("token_mean" if self.loss == "cispo" else "sequence_mean")

    @property
    def clip_epsilons(self) -> tuple[float, float]:
        """Epsilon below and above a ratio of 1."""
        low, high = CLIP_EPSILONS.get(self.loss, (0.2, 0.2))
        low = self.cliprange or low
        return low, self.cliprange_high or (self.cliprange or high)

    @model_validator(mode="after")
    def _group_has_baseline(self) -> "AlgorithmConfig":
        if self.samples_per_prompt < 2 and self.advantage_kind not in ("raw", "max_only"):
            raise ValueError(
                f"samples_per_prompt is {self.samples_per_prompt}: a group needs at least 2 completions, "
                f"or its only advantage is 0 and `{self.loss}` learns nothing"
            )
        return self

    @model_validator(mode="after")
    def _dual_clip_belongs_to_grpo_clip(self) -> "AlgorithmConfig":
        if self.dual_clip is not None and self.loss != "grpo_clip":
            raise ValueError(f"dual_clip belongs to `grpo_clip`, and loss is `{self.loss}`; set it to null")
        _, high = self.clip_epsilons
        if self.dual_clip is not None and self.dual_clip < 1 + high:
            raise ValueError(
                f"dual_clip is {self.dual_clip:g}, inside the clip range, which ends at 1 + cliprange_high = "
                f"{1 + high:g}; give at least that (dual-clip PPO uses 3), or null"
            )
        return self

    @model_validator(mode="after")
    def _correction_makes_sense(self) -> "AlgorithmConfig":
        low, high = self.correction_band
        if low >= high:
            raise ValueError(f"correction_band is ({low:g}, {high:g}): the first must be the smaller")
        is_ratio = self.loss in RATIO_LOSSES
        if self.off_policy_correction != "none" and is_ratio and self.old_log_probs == "behaviour":
            raise ValueError(
                "off_policy_correction weights tokens by proximal / behaviour, which the ratio of "
                f"`{self.loss}` already includes; set old_log_probs to `proximal`, or off_policy_correction "
                "to `none`"
            )
        return self

    @model_validator(mode="after")
    def _updates_fit(self) -> "AlgorithmConfig":
        rollouts = self.prompts_per_step * self.samples_per_prompt
        if self.train_batch_size is not None and rollouts % self.train_batch_size:
            raise ValueError(
                f"train_batch_size ({self.train_batch_size}) must divide prompts_per_step * samples_per_prompt "
                f"({rollouts})"
            )
        return self
