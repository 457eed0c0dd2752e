"""The algorithm as pure tensor functions: torch only, no Ray, no vLLM, no state.

    rewards    ->   advantages    ->  per-token loss  -> one scalar
    (shaping.py)    (advantages.py)   (losses.py)        (aggregation.py), the last two joined in train_step.py

`logprobs.py` makes the log-probabilities that go in, `correction.py` weights for tokens of a sampler that is
not the Learner, `kl.py` the distance to a reference; `mismatch.py` compares sampler and Learner.
"""

from grpo_ray.algorithms.advantages import AdvantageKind, compute_group_normalized_rewards, group_advantages
from grpo_ray.algorithms.aggregation import (
    Aggregation,
    aggregate_loss,
    loss_denominator,
    masked_mean,
    masked_normalize,
)
from grpo_ray.algorithms.correction import (
    Correction,
    effective_sample_fraction,
    effective_sample_sums,
    importance_weights,
)
from grpo_ray.algorithms.kl import KLEstimator, kl_estimate
from grpo_ray.algorithms.logprobs import (
    compute_entropy,
    get_response_log_probs,
    token_log_probs,
    tokenize_prompt_and_output,
)
from grpo_ray.algorithms.losses import (
    RATIO_LOSSES,
    LossType,
    compute_cispo_loss,
    compute_grpo_clip_loss,
    compute_gspo_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    compute_unclipped_loss,
)
from grpo_ray.algorithms.mismatch import logprob_mismatch
from grpo_ray.algorithms.shaping import overlong_penalties
from grpo_ray.algorithms.train_step import Objective, grpo_microbatch_train_step, policy_gradient_step

__all__ = [
    "RATIO_LOSSES",
    "AdvantageKind",
    "Aggregation",
    "Correction",
    "KLEstimator",
    "LossType",
    "Objective",
    "aggregate_loss",
    "compute_cispo_loss",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_gspo_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "compute_unclipped_loss",
    "effective_sample_fraction",
    "effective_sample_sums",
    "get_response_log_probs",
    "group_advantages",
    "grpo_microbatch_train_step",
    "importance_weights",
    "kl_estimate",
    "logprob_mismatch",
    "loss_denominator",
    "masked_mean",
    "masked_normalize",
    "overlong_penalties",
    "policy_gradient_step",
    "token_log_probs",
    "tokenize_prompt_and_output",
]
