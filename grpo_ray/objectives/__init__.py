"""The algorithm as pure functions of tensors and arrays: no Ray, no vLLM; only an entropy bonus has a state.

    rewards  ->  advantages  ->  loss per token  ->  one scalar
           (advantages.py)   (losses.py)      (aggregation.py)

`comparison.py` applies the configured advantage to one group. `objective.py` says which loss, aggregation and
further terms a run uses, and `train_step.py` joins them over one micro-batch. `logprobs.py` and `chunked.py`
compute the log-probabilities that go in, `correction.py` the weights of tokens from a sampler that differs from
the Learner, and `kl.py` distances: to a reference, and between sampler and Learner. Advantages, losses and
corrections are functions of one dataclass each (`inputs.py`), found by name or import path.
The names (`LossType`, ...) are the configuration's. Among those below are the functions of Stanford CS336's
handout of spring 2025; examples/course/ has those of 2026.
"""

from grpo_ray.config.algorithm import AdvantageKind, AlgorithmConfig
from grpo_ray.config.losses import RATIO_LOSSES, Aggregation, LossType
from grpo_ray.objectives.advantages import ADVANTAGES, compute_group_normalized_rewards, group_advantages
from grpo_ray.objectives.aggregation import aggregate_loss, loss_denominator, masked_mean, masked_normalize
from grpo_ray.objectives.checking import check_algorithm
from grpo_ray.objectives.chunked import chunked_log_probs
from grpo_ray.objectives.comparison import advantages_of
from grpo_ray.objectives.correction import CORRECTIONS, correction_weights
from grpo_ray.objectives.inputs import AdvantageInputs, CorrectionInputs, LossInputs, RatioInputs
from grpo_ray.objectives.kl import kl_estimate
from grpo_ray.objectives.logprobs import (
    compute_entropy,
    get_response_log_probs,
    token_log_probs,
    tokenize_prompt_and_output,
)
from grpo_ray.objectives.losses import LOSSES, compute_naive_policy_gradient_loss
from grpo_ray.objectives.objective import Objective
from grpo_ray.objectives.selection import SELECTIONS
from grpo_ray.objectives.train_step import (
    compute_grpo_clip_loss,
    compute_policy_gradient_loss,
    grpo_microbatch_train_step,
    policy_gradient_step,
)

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
    "CorrectionInputs",
    "LossInputs",
    "LossType",
    "Objective",
    "RatioInputs",
    "advantages_of",
    "aggregate_loss",
    "check_algorithm",
    "chunked_log_probs",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "correction_weights",
    "get_response_log_probs",
    "group_advantages",
    "grpo_microbatch_train_step",
    "kl_estimate",
    "loss_denominator",
    "masked_mean",
    "masked_normalize",
    "policy_gradient_step",
    "token_log_probs",
    "tokenize_prompt_and_output",
]
