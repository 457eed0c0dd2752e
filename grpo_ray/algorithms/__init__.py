"""The algorithm as pure tensor functions: torch only, no Ray, no vLLM, no state.

    rewards -> advantages -> per-token loss -> one scalar
    (advantages.py)          (losses.py)       (aggregation.py), the last two joined in train_step.py

`logprobs.py` makes the log-probabilities that go in; `mismatch.py` compares sampler and Learner.
"""

from grpo_ray.algorithms.advantages import compute_group_normalized_rewards, group_advantages
from grpo_ray.algorithms.aggregation import (
    Aggregation,
    aggregate_loss,
    loss_denominator,
    masked_mean,
    masked_normalize,
)
from grpo_ray.algorithms.logprobs import (
    compute_entropy,
    get_response_log_probs,
    token_log_probs,
    tokenize_prompt_and_output,
)
from grpo_ray.algorithms.losses import (
    LossType,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
)
from grpo_ray.algorithms.mismatch import logprob_mismatch
from grpo_ray.algorithms.train_step import grpo_microbatch_train_step, policy_gradient_step

__all__ = [
    "Aggregation",
    "LossType",
    "aggregate_loss",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "get_response_log_probs",
    "group_advantages",
    "grpo_microbatch_train_step",
    "logprob_mismatch",
    "loss_denominator",
    "masked_mean",
    "masked_normalize",
    "policy_gradient_step",
    "token_log_probs",
    "tokenize_prompt_and_output",
]
