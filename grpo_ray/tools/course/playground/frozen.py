"""The lecture's frozen denominator: `p / p_old` with p = sigmoid(w), where p_old is the same number, fixed.

Three ratios whose value is 1 at every w. What is right differs from what is not in the gradient alone.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_ray.algorithms import compute_unclipped_loss
from grpo_ray.algorithms.logprobs import clamped_exp

LECTURE_W = 2.0
Ratio = Callable[[Tensor, Tensor], Tensor]


def frozen(log_p: Tensor, log_p_old: Tensor) -> Tensor:
    """`p / p_old`, where p_old is a constant: the package's loss freezes it. `[n]` to `[n]`."""
    ones = torch.ones(len(log_p), 1)
    loss, _ = compute_unclipped_loss(ones, log_p[:, None], log_p_old[:, None])
    return -loss[:, 0]


def not_frozen(log_p: Tensor, log_p_old: Tensor) -> Tensor:
    """`p / p_old`, where both follow w: a constant 1. `[n]` to `[n]`."""
    return clamped_exp(log_p - log_p_old)


def of_log_probs(log_p: Tensor, log_p_old: Tensor) -> Tensor:
    """`log p / log p_old`, which the lecture's code has for the ratio; frozen. `[n]` to `[n]`.

    Both are negative: it grows as p falls.
    """
    return log_p / log_p_old.detach()


RATIOS: dict[str, Ratio] = {
    "p / p_old, p_old frozen": frozen,
    "p / p_old, p_old not frozen": not_frozen,
    "log p / log p_old, frozen (lecture's code)": of_log_probs,
}


def gradients(ratio: Ratio, w: Tensor) -> Tensor:
    """d ratio / dw at every w, `[n]` to `[n]`; p_old is computed from w too, as just before an update."""
    w = w.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(ratio(logsigmoid(w), logsigmoid(w)).sum(), w)
    return gradient


def slope(ratio: Ratio, w: float) -> float:
    """d ratio / dw at one w."""
    return gradients(ratio, torch.tensor([w])).item()


def ascend(ratio: Ratio, start: float = -2.0, num_steps: int = 60, step_size: float = 0.5) -> list[float]:
    """p before and after each step of gradient ascent on the ratio, whose advantage is 1."""
    w = torch.tensor([start])
    course = [w.sigmoid().item()]
    for _ in range(num_steps):
        w = w + step_size * gradients(ratio, w)
        course.append(w.sigmoid().item())
    return course
