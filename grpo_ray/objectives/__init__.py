"""The algorithm as pure tensor functions: torch only, no Ray, no vLLM, no state.

    rewards  ->  advantages  ->  loss per token  ->  one scalar
           (advantages.py)   (losses.py)      (aggregation.py)

`comparison.py` applies the configured advantage to one group. `objective.py` says which loss, aggregation and
further terms a run uses, and `train_step.py` joins them over one micro-batch. `logprobs.py` and `chunked.py`
compute the log-probabilities that go in, `correction.py` the weights of tokens from a sampler that differs from
the Learner, and `kl.py` distances: to a reference, and between sampler and Learner. Advantages, losses and
corrections are functions of one dataclass each (`inputs.py`), found by name or import path in `registry.py`.
The names (`LossType`, ...) are the configuration's. Among those below are the functions of Stanford CS336's
handout of spring 2025; examples/course/ has those of 2026.
"""

from grpo_ray.config.algorithm import (
    AdvantageKind,
    AlgorithmConfig,
    Correction,
    KLConfig,
    KLEstimator,
)
from grpo_ray.config.losses import RATIO_LOSSES, Aggregation, LossType
from grpo_ray.objectives.advantages import (
    ADVANTAGES,
    compute_group_normalized_rewards,
    group_advantages,
    overlong_penalties,
)
from grpo_ray.objectives.aggregation import (
    aggregate_loss,
    gradient_sums,
    loss_denominator,
    masked_mean,
    masked_normalize,
)
from grpo_ray.objectives.checking import acts_without_advantage, check_algorithm, notices_on_loss
from grpo_ray.objectives.chunked import chunked_log_probs
from grpo_ray.objectives.comparison import advantages_of, compare_group, shaped_rewards, spread
from grpo_ray.objectives.correction import (
    CORRECTIONS,
    correction_sums,
    correction_weights,
    effective_sample_fraction,
    effective_sample_sums,
)
from grpo_ray.objectives.inputs import AdvantageInputs, CorrectionInputs, LossInputs, RatioInputs
from grpo_ray.objectives.kl import kl_estimate, kl_sums, logprob_mismatch, teacher_term
from grpo_ray.objectives.logprobs import (
    compute_entropy,
    get_response_log_probs,
    token_log_probs,
    tokenize_prompt_and_output,
)
from grpo_ray.objectives.losses import (
    LOSSES,
    apply_loss,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
)
from grpo_ray.objectives.objective import Objective
from grpo_ray.objectives.selection import SELECTIONS
from grpo_ray.objectives.train_step import grpo_microbatch_train_step, policy_gradient_step

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "LOSSES",
    "RATIO_LOSSES",
    "SELECTIONS",
    "AdvantageInputs",
    "AdvantageKind",
    "Aggregation",
    "AlgorithmConfig",
    "Correction",
    "CorrectionInputs",
    "KLConfig",
    "KLEstimator",
    "LossInputs",
    "LossType",
    "Objective",
    "RatioInputs",
    "acts_without_advantage",
    "advantages_of",
    "aggregate_loss",
    "apply_loss",
    "check_algorithm",
    "chunked_log_probs",
    "compare_group",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "correction_sums",
    "correction_weights",
    "effective_sample_fraction",
    "effective_sample_sums",
    "get_response_log_probs",
    "gradient_sums",
    "group_advantages",
    "grpo_microbatch_train_step",
    "kl_estimate",
    "kl_sums",
    "logprob_mismatch",
    "loss_denominator",
    "masked_mean",
    "masked_normalize",
    "notices_on_loss",
    "overlong_penalties",
    "policy_gradient_step",
    "shaped_rewards",
    "spread",
    "teacher_term",
    "token_log_probs",
    "tokenize_prompt_and_output",
]
