"""The lecture's frozen denominator: `p / p_old` with p = sigmoid(w), where p_old is the same, but constant.

All three ratios have the value 1 at every w. The right one differs from the wrong ones only in its gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from grpo_ray.objectives import compute_policy_gradient_loss
from grpo_ray.objectives.logprobs import clamped_exp

LECTURE_W = 2.0
Ratio = Callable[[Tensor, Tensor], Tensor]


def frozen(log_p: Tensor, log_p_old: Tensor) -> Tensor:
    """Return `p / p_old` with a constant p_old, which the package's loss detaches. `[n]` to `[n]`."""
    ones = torch.ones(len(log_p), 1)
    loss, _ = compute_policy_gradient_loss(
        log_p[:, None], "unclipped", advantages=ones, old_log_probs=log_p_old[:, None]
    )
    return -loss[:, 0]


def not_frozen(log_p: Tensor, log_p_old: Tensor) -> Tensor:
    """Return `p / p_old` where both depend on w, so that it is constantly 1. `[n]` to `[n]`."""
    return clamped_exp(log_p - log_p_old)


def of_log_probs(log_p: Tensor, log_p_old: Tensor) -> Tensor:
    """Return `log p / log p_old`, the ratio in the lecture's code, with a constant p_old. `[n]` to `[n]`.

    Both logarithms are negative, so it grows as p falls.
    """
    return log_p / log_p_old.detach()


RATIOS: dict[str, Ratio] = {
    "p / p_old, p_old frozen": frozen,
    "p / p_old, p_old not frozen": not_frozen,
    "log p / log p_old, frozen (lecture's code)": of_log_probs,
}


def gradients(ratio: Ratio, w: Tensor) -> Tensor:
    """Return d ratio / dw at every w, where p_old is the current p, as before an update. `[n]` to `[n]`."""
    w = w.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(ratio(logsigmoid(w), logsigmoid(w)).sum(), w)
    return gradient


def slope(ratio: Ratio, w: float) -> float:
    """Return d ratio / dw at one w."""
    return gradients(ratio, torch.tensor([w])).item()


def ascend(ratio: Ratio, start: float = -2.0, num_steps: int = 60, step_size: float = 0.5) -> list[float]:
    """Return p before and after each step of gradient ascent on the ratio, with an advantage of 1."""
    w = torch.tensor([start])
    history = [w.sigmoid().item()]
    for _ in range(num_steps):
        w = w + step_size * gradients(ratio, w)
        history.append(w.sigmoid().item())
    return history
