"""Control of the entropy by tokens: those that are trained on, or held back, chosen over a whole batch.

Each takes values of all sampled tokens of a batch, in the order of its sequences, by the policy before the
batch's first update, so that the choice is the same however the batch is split. It returns factors of the token
losses, and coefficients of `|log(pi / pi_old)|`, which is added to them; each `[tokens]`.
"""

from collections.abc import Callable
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le
from pydantic import NonNegativeFloat

from grpo_ray.config.algorithm import TokenSelection

Values = np.ndarray  # [tokens]
SelectionFn = Callable[..., tuple[Values, Values]]
Share = Annotated[float, Ge(0), Le(1)]


def top_entropy(
    log_probs: Values, entropies: Values, advantages: Values, rng: np.random.Generator, *, share: Share = 0.2
) -> tuple[Values, Values]:
    """Train only on the `share` of tokens with the largest entropy ("forking tokens").

    (Wang et al., "Beyond the 80/20 Rule", arXiv:2506.01939.) Tokens equal to the quantile are kept.
    """
    return (entropies >= np.quantile(entropies, 1 - share)).astype(np.float32), np.zeros_like(entropies)


def clip_cov(
    log_probs: Values, entropies: Values, advantages: Values, rng: np.random.Generator, *, share: Share = 2e-4,
    low: float = 1.0, high: float = 5.0,
) -> tuple[Values, Values]:  # fmt: skip
    """Leave out a random `share` of the tokens, from those of a covariance between `low` and `high`.

    (Cui et al., "The Entropy Mechanism of RL", arXiv:2505.22617: Clip-Cov.) Tokens that are both likely and
    good take the entropy away: their covariance `(log pi - mean) * (A - mean)` is large.
    """
    covariance = _covariance(log_probs, advantages)
    candidates = np.flatnonzero((covariance > low) & (covariance < high))
    num_left_out = min(len(candidates), max(1, int(share * len(log_probs))))
    weights = np.ones(len(log_probs), np.float32)
    weights[rng.permutation(candidates)[:num_left_out]] = 0.0
    return weights, np.zeros_like(weights)


def kl_cov(
    log_probs: Values, entropies: Values, advantages: Values, rng: np.random.Generator, *, share: Share = 2e-3,
    coefficient: NonNegativeFloat = 1.0,
) -> tuple[Values, Values]:  # fmt: skip
    """Hold back the `share` of tokens with the largest covariance by `coefficient` times `|log(pi / pi_old)|`.

    (The same paper: KL-Cov.)
    """
    num_held = max(1, int(share * len(log_probs)))
    penalties = np.zeros(len(log_probs), np.float32)
    penalties[np.argsort(-_covariance(log_probs, advantages), kind="stable")[:num_held]] = coefficient
    return np.ones_like(penalties), penalties


SELECTIONS: dict[TokenSelection, SelectionFn] = {
    "top_entropy": top_entropy,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}


def _covariance(log_probs: Values, advantages: Values) -> Values:
    covariance: Values = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    return covariance
