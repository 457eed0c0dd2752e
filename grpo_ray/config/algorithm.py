"""The algorithm's configuration: the advantage of a reward, and the loss that the policy is trained on.

The names that fields choose among stand here alone; `grpo_ray.objectives` implements each of them.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, Tag, model_validator

from grpo_ray.config.losses import PRESETS, Aggregation, LossType, PresetName, loss_record, refuse_clip_range
from grpo_ray.config.section import NAME_OR_LIST, Decay, GroupSize, NonNegativeFloat, NonNegativeInt, Section
from grpo_ray.config.user_code import Argument, is_function_name, one_of_or_own

AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "max_only", "raw", "max_rl", "pass_at_k", "gdpo"]
Std = Literal["sample", "population"]
Correction = Literal[
    "truncate_token", "truncate_sequence", "mask_band", "mask_product", "mask_geometric", "veto", "opsm"
]
# The corrections that weigh a token by proximal / behaviour; the other ones keep or drop a whole response.
WEIGHING: tuple[Correction, ...] = ("truncate_token", "truncate_sequence", "mask_band")
TokenSelection = Literal["none", "top_entropy", "clip_cov", "kl_cov"]
# The advantages that keep the sign and size of rewards.
UNCENTRED: tuple[AdvantageKind, ...] = ("max_only", "raw")
# The advantages in units of reward.
IN_REWARDS: tuple[AdvantageKind, ...] = ("raw", "mean", "leave_one_out", "max_only")
KLEstimator = Literal["k1", "k2", "k3", "k1+", "k3+", "unbiased"]


def _several(names: tuple[str, ...]) -> tuple[str, ...]:
    if "none" in names or len(set(names)) < len(names) or not names:
        raise ValueError(f"{list(names)} is not a list of different corrections; give `none` for none")
    return names


CorrectionName = Annotated[str, one_of_or_own(("none", *get_args(Correction)))]
CorrectionNames = Annotated[tuple[CorrectionName, ...], AfterValidator(_several)]
Corrections = Annotated[
    Annotated[CorrectionName, Tag("name")] | Annotated[CorrectionNames, Tag("list")], NAME_OR_LIST
]

MAX_ROLLOUTS = 2**22
"""Responses per step, or of a validation: 0.6 KB each in memory, even those of three tokens."""


class KLConfig(Section):
    """KL divergence of the policy from a reference: measured, and penalised if `coefficient` is above 0."""

    reference: Literal["none", "initial", "ema"] = "none"
    """`initial`: a frozen copy of the initial weights; `ema`: a moving average of the policy's weights."""
    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL penalty (beta); 0 only measures."""
    placement: Literal["loss", "reward", "reward_to_go"] = "loss"
    """Place of the penalty. `loss`: a term per token. `reward`: each response's reward is reduced by the sum of
    its tokens' log(policy / reference), whatever `estimator` says, before rewards are compared. `reward_to_go`:
    each token's advantage is reduced by that sum from the token on (REINFORCE++)."""
    estimator: KLEstimator = "k3"
    """Estimator of the penalty (Schulman's k1, k2, k3). As a penalty, k1 has no gradient on average, k2 has
    that of KL(policy || reference), and k3 that of KL(reference || policy). `k1+`, `k3+`: the value of k1 or k3
    with the gradient of k2. `unbiased`: k3 times the policy's ratio to the old logprobs, also right for tokens
    of an older policy (DeepSeek-V3.2)."""
    refresh_every_num_steps: PositiveInt | None = None
    """Copy the policy into the reference every N steps (`initial` only)."""
    ema_decay: Decay = 0.99
    """Share of its own weights that an `ema` reference keeps per step."""

    @property
    def loss_coefficient(self) -> float:
        """Weight of the penalty in the loss."""
        return self.coefficient if self.placement == "loss" else 0.0

    def _conflicts(self) -> Iterator[str]:
        if self.coefficient and self.reference == "none":
            yield "coefficient needs a reference; set reference to `initial` or `ema`"
        if self.placement != "loss" and not self.coefficient:
            yield f"placement `{self.placement}` needs a coefficient above 0; otherwise nothing is subtracted"
        if self.refresh_every_num_steps is not None and self.reference != "initial":
            yield "refresh_every_num_steps needs reference `initial`; an `ema` moves by itself"


class AlgorithmConfig(Section):
    preset: PresetName | None = None
    """A published algorithm, which sets several of the fields below; fields that you set yourself win."""
    num_steps: PositiveInt = 200
    """Training steps, each on one rollout batch (CS336's n_grpo_steps)."""
    prompts_per_step: PositiveInt = 32
    """Groups per step; times `samples_per_prompt`, they are CS336's rollout_batch_size."""
    samples_per_prompt: GroupSize = 8
    """Completions per prompt, G (CS336's group_size)."""
    advantage: Annotated[str, one_of_or_own(get_args(AdvantageKind))] = "mean_std"
    """Conversion of a group's rewards to advantages, or a function of your own as `module:function`.
    `mean_std`: minus the group's mean, divided by its standard deviation. `mean`: minus the mean.
    `leave_one_out`: minus the mean of the other completions (RLOO). `max_only`: 0 for all but the group's best.
    `raw`: unchanged. `max_rl`: minus the mean, divided by the mean (MaxRL). `pass_at_k`: credit for groups of k
    in which a response succeeds. `gdpo`: `mean_std` of each reward term, then their weighted sum (GDPO)."""
    advantage_options: dict[str, Argument] = Field(default_factory=dict)
    """Keyword arguments of the advantage function other than `std` and `advantage_eps`."""
    advantage_scale: Literal["group", "batch", "whiten_responses", "whiten_tokens"] = "group"
    """Change of the advantages over the whole batch, before the first update on it. `group`: none. `batch`:
    divided by the standard deviation of the batch's rewards (for `mean` and `leave_one_out`).
    `whiten_responses`, `whiten_tokens`: minus their mean and divided by their standard deviation, over the
    batch's responses or tokens (REINFORCE++)."""
    std: Std = "sample"
    """Standard deviation of advantages: `sample` divides the squares by their number minus 1 (in a group, G -
    1), `population` by their number."""
    advantage_eps: PositiveFloat = 1e-6
    """Added to the divisors of advantages: standard deviations, and the mean for `max_rl`."""
    loss: Annotated[str, one_of_or_own(get_args(LossType))] = "grpo_clip"
    """Loss per token, or your own as `module:function`; `no_baseline` takes raw rewards, not advantages."""
    loss_options: dict[str, Argument] = Field(default_factory=dict)
    """Keyword arguments of the loss function other than the three below."""
    cliprange: PositiveFloat | None = None
    """Epsilon: ratios are clipped to 1 - epsilon and 1 + epsilon; from 1 on there is no lower bound. Default:
    0.2. `gspo` and `luspo` average ratios over a response: 3e-4 below and 4e-4 above. `cispo` has ratios as
    weights: no bound below, 4 above. `gmpo` clips log ratios: 0.4."""
    cliprange_high: PositiveFloat | None = None
    """Epsilon of the upper bound, if it differs (DAPO's clip-higher); default: that of `cliprange`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio at a negative advantage (dual-clip PPO, `grpo_clip`); at least `cliprange_high` + 1."""
    aggregation: Aggregation | None = None
    """Reduction of token losses to one number. `sequence_mean`: mean over each response, then over responses.
    `token_mean`: mean over all tokens. `constant`: sum over each response divided by `sampling.max_tokens`,
    then mean over responses. `sequence_sum`: sum over each response, then mean over responses. `prompt_mean`:
    mean over all tokens of a prompt's responses, then over prompts. Default: `token_mean` for `cispo` and
    `vespo`, `sequence_sum` for `luspo`, `sequence_mean` for every other loss."""
    epochs_per_batch: PositiveInt = 1
    """Passes over each rollout batch (CS336's epochs_per_rollout_batch)."""
    train_batch_size: PositiveInt | None = None
    """Responses per optimizer update; default: the rollout batch, so one update per epoch."""
    old_log_probs: Literal["behaviour", "proximal"] = "behaviour"
    """Denominator of the ratio. `behaviour`: logprobs from the sampler. `proximal`: logprobs that the Learner
    computes before its first update on the batch; with one update per batch every ratio is then 1."""
    off_policy_correction: Corrections = "none"
    """Weight on token losses by the ratio proximal / behaviour: truncated per token (`truncate_token`) or per
    response (`truncate_sequence`), or 0 outside a band (`mask_band`, IcePop). `mask_product` and
    `mask_geometric` drop a response if the product or geometric mean of its ratios is outside a band. `veto`
    drops it if one ratio is tiny, `opsm` if it drifted and has a negative advantage. Or a function of your own
    as `module:function`. The weights of a list of these are multiplied. A token without a sampler's logprob has
    weight 0, and is still counted."""
    correction_options: dict[str, Argument] = Field(default_factory=dict)
    """Keyword arguments of the correction functions other than the two below."""
    correction_cap: PositiveFloat = 2.0
    """Largest truncated weight."""
    correction_band: tuple[NonNegativeFloat | None, PositiveFloat | None] | None = None
    """Smallest and largest ratio that a mask keeps; null: no bound on that side. Default: 0.5 and 5 for
    `mask_band`, none and 3 for `mask_product`, 0.999 and 1.001 for `mask_geometric`."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the tokens' entropy, which is maximised and aggregated like the loss."""
    entropy_target: NonNegativeFloat | None = None
    """Target for the mean entropy in nats per token: the weight begins with `entropy_bonus` at step 1. It
    rises after a step at or below the target, falls after any other, and acts only after one at or below it."""
    entropy_step: PositiveFloat = 0.005
    """Change of an adapted weight per step."""
    entropy_bonus_max: PositiveFloat = 1.0
    """Largest adapted weight."""
    token_selection: TokenSelection = "none"
    """Tokens to train on, chosen over the whole batch by the policy before its first update. `top_entropy`:
    only those with the largest entropy. `clip_cov` leaves out, and `kl_cov` holds back, some that are both
    likely and good, and so reduce the entropy. Costs a forward pass."""
    selection_options: dict[str, Argument] = Field(default_factory=dict)
    """Keyword arguments of the token selection, such as its `share` of the tokens."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Tokens before `sampling.max_tokens` that each cost reward (DAPO's soft overlong punishment); 0: none."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Reward subtracted at `sampling.max_tokens`; proportionally less within the zone."""
    mask_truncated: bool = False
    """Do not train on responses cut off at `sampling.max_tokens`, nor count them in the loss's denominator.
    Their rewards still count in the group."""
    dynamic_sampling_tries: NonNegativeInt = 0
    """Replace groups without signal by new prompts (DAPO), at most N batches of them per step."""
    dynamic_sampling_metric: Literal["advantage", "reward", "answer"] = "advantage"
    """Signal that a group needs: an `advantage` other than 0, different `reward`s (before the penalty of
    overlong responses), or different `answer` rewards, as in DAPO."""
    oversample_frac: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Extra groups in flight, as a share of a step's; the last ones are aborted and sampled again later."""
    kl: KLConfig = KLConfig()

    @property
    def advantage_kind(self) -> str:
        """The kind in effect, or `module:function`: `no_baseline` takes raw rewards."""
        return "raw" if self.loss == "no_baseline" else self.advantage

    @property
    def whitens_uncentred(self) -> bool:
        """True if groups in which every advantage is 0 have another one in the end."""
        return self.advantage_scale.startswith("whiten") and self.advantage_kind in UNCENTRED

    @property
    def loss_aggregation(self) -> Aggregation:
        """The aggregation in effect: that of CISPO's paper divides by tokens, that of LUSPO's sums them."""
        return self.aggregation or loss_record(self.loss).aggregation

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections in effect, of which the weights are multiplied."""
        names = self.off_policy_correction
        return names if isinstance(names, tuple) else () if names == "none" else (names,)

    @property
    def limits(self) -> tuple[str, ...]:
        """Those of `correction_cap` and `correction_band` that are not the defaults: they need a correction."""
        fields = ("correction_cap", "correction_band")
        return tuple(name for name in fields if getattr(self, name) != type(self).model_fields[name].default)

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the entropy is part of the objective, at least in some steps."""
        return self.entropy_bonus > 0 or self.entropy_target is not None

    @property
    def clip_epsilons(self) -> tuple[float, float]:
        """Epsilon below and above a ratio of 1."""
        return loss_record(self.loss).clip_epsilons(self.cliprange, self.cliprange_high)

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, given: Any) -> Any:
        """Return the section with its preset's fields, under those that are given.

        A resolved section gives them all, so expanding it again changes nothing. An unknown preset is left to
        the field's own check.
        """
        name = given.get("preset") if isinstance(given, dict) else None
        preset = next((preset for known, preset in PRESETS.items() if known == name), None)
        if preset is None:
            return given
        kl = given.get("kl", {})
        whole = {"kl": {**preset.fields.get("kl", {}), **kl}} if isinstance(kl, dict) else {}
        is_clip = given.get("loss", "grpo_clip") == "grpo_clip"  # which the preset's clip range is meant for
        fields = {name: value for name, value in preset.fields.items() if is_clip or "cliprange" not in name}
        return {**fields, **given, **whole}

    def _conflicts(self) -> Iterator[str]:
        yield from self._conflicts_of_advantages()
        yield from self._conflicts_of_the_kl_in_rewards()
        yield from self._conflicts_of_losses()
        yield from self._conflicts_of_updates()

    def _conflicts_of_advantages(self) -> Iterator[str]:
        kind, scale = self.advantage_kind, self.advantage_scale
        if self.samples_per_prompt < 2 and kind not in ("raw", "max_only") and not is_function_name(kind):
            yield (
                f"samples_per_prompt is {self.samples_per_prompt}: a group needs at least 2 completions, "
                f"or its only advantage is 0 and `{self.loss}` learns nothing"
            )
        if self.loss == "no_baseline" and scale != "group":
            yield (
                f"advantage_scale: `no_baseline` takes raw rewards, and `{scale}` would change them; set it to "
                "`group`, or loss to `reinforce_with_baseline`"
            )
        if scale == "batch" and kind not in ("mean", "leave_one_out") and not is_function_name(kind):
            yield (
                "advantage_scale: `batch` needs advantages that are centred but not yet scaled; set advantage "
                f"to `mean` or `leave_one_out` (it is `{kind}`)"
            )
        if self.whitens_uncentred and self.dynamic_sampling_tries:
            yield (
                f"dynamic_sampling_tries drops groups in which every advantage is 0, but `{kind}` with "
                f"`{scale}` would give those groups advantages; set it to 0, or advantage to `mean`"
            )
        if self.dynamic_sampling_metric != "advantage" and not self.dynamic_sampling_tries:
            yield (
                f"dynamic_sampling_metric: `{self.dynamic_sampling_metric}` has no effect without dynamic "
                "sampling; set dynamic_sampling_tries, or leave it out"
            )
        if kind == "max_rl" and self.overlong_buffer_tokens:
            yield (
                "overlong_buffer_tokens: `max_rl` divides by the mean reward, which penalties can bring near "
                "0; set it to 0, or choose another advantage"
            )

    def _conflicts_of_the_kl_in_rewards(self) -> Iterator[str]:
        kind, scale = self.advantage_kind, self.advantage_scale
        if self.kl.placement == "reward" and kind not in IN_REWARDS and not is_function_name(kind):
            reason = "divides by the group's spread, which between equal rewards is that of the KL itself: the "
            reason += "coefficient would have no effect"
            if kind in ("max_rl", "pass_at_k"):
                reason = "is for rewards of 0 and 1, and no penalty can be subtracted from those"
            yield (
                f"kl.placement: `{kind}` {reason}; set advantage to one of {', '.join(IN_REWARDS)} "
                "(advantage_scale `batch` or `whiten_responses` gives them a scale), or kl.placement to `loss`"
            )
        if self.kl.placement != "loss" and self.mask_truncated:
            yield (
                f"kl.placement: `{self.kl.placement}` needs the KL of all responses, but mask_truncated "
                "removes some before it is computed; set mask_truncated to false, or kl.placement to `loss`"
            )
        if self.kl.placement != "reward_to_go":
            return
        if kind not in IN_REWARDS and not is_function_name(kind):
            yield (
                f"kl.placement: `reward_to_go` is subtracted from advantages in units of reward, but `{kind}` "
                f"rescales them; set advantage to one of {', '.join(IN_REWARDS)}, or kl.placement to `reward`"
            )
        if scale not in ("group", "whiten_tokens"):
            yield (
                "advantage_scale: kl.placement `reward_to_go` gives each token its own advantage, but "
                f"`{scale}` works on whole responses; set it to `whiten_tokens` or `group`"
            )

    def _conflicts_of_losses(self) -> Iterator[str]:
        refuse_clip_range(self.loss, cliprange=self.cliprange, cliprange_high=self.cliprange_high)
        if self.dual_clip is not None and self.loss != "grpo_clip" and not is_function_name(self.loss):
            yield f"dual_clip works only with `grpo_clip`, but loss is `{self.loss}`; set dual_clip to null"
        _, high = self.clip_epsilons
        if self.dual_clip is not None and self.dual_clip < 1 + high:
            yield (
                f"dual_clip ({self.dual_clip:g}) must be at least 1 + cliprange_high = {1 + high:g}, the end "
                "of the clip range; dual-clip PPO uses 3"
            )
        smallest, largest = self.correction_band or (None, None)
        if smallest is not None and largest is not None and smallest >= largest:
            yield f"correction_band is ({smallest:g}, {largest:g}): the first must be the smaller"
        if self.entropy_target is not None and self.entropy_bonus > self.entropy_bonus_max:
            yield (
                f"entropy_bonus ({self.entropy_bonus:g}), from which entropy_target starts, is above "
                f"entropy_bonus_max ({self.entropy_bonus_max:g}); lower it, or raise entropy_bonus_max"
            )
        self.refuse_two_ratios(loss_record(self.loss).has_ratio and not is_function_name(self.loss))

    def refuse_two_ratios(self, uses_ratio: bool) -> None:
        """Raise ValueError if a loss with a ratio is weighted by the ratio that it already includes."""
        weighing = [name for name in self.corrections if name in WEIGHING]
        if weighing and uses_ratio and self.old_log_probs == "behaviour":
            raise ValueError(
                "off_policy_correction weights tokens by proximal / behaviour, which is already part of the "
                f"ratio of `{self.loss}`; set old_log_probs to `proximal`, or off_policy_correction to `none`"
            )

    def _conflicts_of_updates(self) -> Iterator[str]:
        rollouts = self.prompts_per_step * self.samples_per_prompt
        is_single = self.epochs_per_batch == 1 and (self.train_batch_size or rollouts) >= rollouts
        if self.token_selection == "kl_cov" and self.old_log_probs == "proximal" and is_single:
            yield (
                "token_selection `kl_cov` penalizes |log(pi / pi_old)|, which is 0 in the only update on a "
                "batch with old_log_probs `proximal`; set old_log_probs to `behaviour`, or train_batch_size "
                "for several updates"
            )
        if rollouts > MAX_ROLLOUTS:
            yield (
                f"prompts_per_step ({self.prompts_per_step:,}) * samples_per_prompt "
                f"({self.samples_per_prompt:,}) is {rollouts:,} responses per step, which are in memory "
                f"together; give at most {MAX_ROLLOUTS:,}"
            )
        if self.train_batch_size is not None and rollouts % self.train_batch_size:
            yield (
                f"train_batch_size ({self.train_batch_size}) must divide prompts_per_step * samples_per_prompt "
                f"({rollouts})"
            )
