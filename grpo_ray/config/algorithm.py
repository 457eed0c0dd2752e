"""The configuration of the algorithm: what a reward is worth, and what the policy learns from it."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from grpo_ray.config.section import Decay, NonNegativeFloat, NonNegativeInt, Section


class KLConfig(Section):
    """Distance of the policy to a reference: measured, and if asked for a term of the loss."""

    reference: Literal["none", "initial", "ema"] = "none"
    """`initial`: a frozen copy of the first weights; `ema`: a moving average of the policy's own."""
    coefficient: NonNegativeFloat = 0.0
    """Weight of the penalty in the loss (beta); 0 only measures."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The penalty's estimator (Schulman)."""
    refresh_every_num_steps: PositiveInt | None = None
    """Copy the policy into the reference every so many steps (`initial` only)."""
    ema_decay: Decay = 0.99
    """What an `ema` reference keeps of itself each step."""

    @model_validator(mode="after")
    def _consistent(self) -> "KLConfig":
        if self.coefficient and self.reference == "none":
            raise ValueError("coefficient needs a reference; set reference to `initial` or `ema`")
        if self.refresh_every_num_steps is not None and self.reference != "initial":
            raise ValueError("refresh_every_num_steps needs reference `initial`; an `ema` moves by itself")
        return self


AdvantageKind = Literal["mean_std", "mean", "leave_one_out", "max_only", "raw"]
RATIO_LOSSES = ("unclipped", "grpo_clip", "gspo", "cispo")  # those that compare with old log-probabilities


class AlgorithmConfig(Section):
    num_steps: PositiveInt = 200
    """Steps, each one rollout batch (the handout's n_grpo_steps)."""
    prompts_per_step: PositiveInt = 32
    """Groups a step; times `samples_per_prompt` is the handout's rollout_batch_size."""
    samples_per_prompt: PositiveInt = 8
    """Completions a prompt, G (the handout's group_size)."""
    advantage: AdvantageKind = "mean_std"
    """What a reward is worth: centred on its group and divided by the group's standard deviation; centred
    only; centred on the others' mean (RLOO); kept by the group's best alone; or as it is."""
    std: Literal["sample", "population"] = "sample"
    """Divide the squares by G - 1 or by G (`mean_std`)."""
    advantage_eps: PositiveFloat = 1e-6
    """Added to the group's standard deviation."""
    loss: Literal["no_baseline", "reinforce_with_baseline", "unclipped", "grpo_clip", "gspo", "cispo"] = (
        "grpo_clip"
    )
    """`no_baseline` takes raw rewards, whatever `advantage` says."""
    cliprange: PositiveFloat | None = None
    """Epsilon: ratios are clipped below 1 - epsilon and above 1 + epsilon; default: 0.2, and for `gspo`, whose
    ratios are means over a response, 3e-4 below and 4e-4 above."""
    cliprange_high: PositiveFloat | None = None
    """Another epsilon above (DAPO's clip-higher); default: the same as `cliprange`."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on ratio times a negative advantage (dual-clip PPO; `grpo_clip`)."""
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    """Mean over each response then over responses; over all tokens; or sum over `sampling.max_tokens`."""
    epochs_per_batch: PositiveInt = 1
    """Times a rollout batch is trained on (the handout's epochs_per_rollout_batch)."""
    train_batch_size: PositiveInt | None = None
    """Responses an optimizer update; default: the rollout batch, so one update an epoch."""
    old_log_probs: Literal["behaviour", "proximal"] = "behaviour"
    """Ratios compare with what the sampler assigned, or with the Learner before it updates on the batch."""
    off_policy_correction: Literal["none", "truncate_token", "truncate_sequence", "mask_band"] = "none"
    """Weigh by proximal / behaviour, truncated, by token or response, or 0 outside a band (IcePop)."""
    correction_cap: PositiveFloat = 2.0
    """Largest truncated weight."""
    correction_band: tuple[NonNegativeFloat, PositiveFloat] = (0.5, 5.0)
    """Weights that `mask_band` keeps."""
    entropy_bonus: NonNegativeFloat = 0.0
    """Weight of the mean token entropy, which is maximised."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """The last so many tokens before `sampling.max_tokens` cost reward (DAPO's soft overlong punishment)."""
    overlong_penalty: NonNegativeFloat = 1.0
    """The cost at `sampling.max_tokens`."""
    mask_truncated: bool = False
    """Responses cut off at `sampling.max_tokens` are not trained on (their rewards count in the group)."""
    dynamic_sampling_tries: NonNegativeInt = 0
    """Groups without signal are replaced by further prompts (DAPO), up to so many batches a step."""
    oversample_frac: NonNegativeFloat = 0.0
    """Start so many more groups than a step needs; the last to finish are cut off, and asked again."""
    kl: KLConfig = KLConfig()

    @property
    def advantage_kind(self) -> AdvantageKind:
        return "raw" if self.loss == "no_baseline" else self.advantage

    @property
    def clip_epsilons(self) -> tuple[float, float]:
        """Below and above 1."""
        low, high = (3e-4, 4e-4) if self.loss == "gspo" else (0.2, 0.2)
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
    def _clips_make_sense(self) -> "AlgorithmConfig":
        if self.dual_clip is not None and self.loss != "grpo_clip":
            raise ValueError(f"dual_clip belongs to `grpo_clip`, and loss is `{self.loss}`; set it to null")
        low, high = self.correction_band
        if low >= high:
            raise ValueError(f"correction_band is ({low:g}, {high:g}): the first must be the smaller")
        is_ratio = self.loss in RATIO_LOSSES
        if self.off_policy_correction != "none" and is_ratio and self.old_log_probs == "behaviour":
            raise ValueError(
                f"off_policy_correction weighs by proximal / behaviour, which the ratio of `{self.loss}` holds "
                "already; set old_log_probs to `proximal`, or off_policy_correction to `none`"
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
