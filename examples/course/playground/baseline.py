"""The lecture's two states: a baseline keeps the gradient's mean and removes most of its noise.

    state s1: action a1 earns 11, a2 earns 9       state s2: a1 earns 0, a2 earns 2

Both states are equally likely, and the policy chooses both actions equally often. So there are four possible
samples, from which mean and variance of the gradient estimate are computed exactly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_ray.objectives import AdvantageKind, compute_naive_policy_gradient_loss, group_advantages

REWARDS = torch.tensor([[11.0, 9.0], [0.0, 2.0]])  # [state, action]
NUM_ESTIMATES = 20_000


@dataclass(frozen=True)
class Estimates:
    """The gradients of the four samples, with one kind of deltas."""

    deltas: Tensor
    """`[state, action]`."""
    gradients: Tensor
    """`[state, action, 4]`: the estimate of the gradient by the four logits, from this sample alone."""

    @property
    def delta_std(self) -> float:
        """Sample standard deviation of the four deltas, which the lecture calls their variance."""
        return self.deltas.std().item()

    @property
    def mean(self) -> Tensor:
        """`[4]`: the expected gradient."""
        return self.gradients.flatten(0, 1).mean(dim=0)

    @property
    def variance(self) -> float:
        """Variance of one sample's gradient, summed over its four components."""
        return self.gradients.flatten(0, 1).var(dim=0, correction=0).sum().item()

    def draw(self, num_samples: int, seed: int = 0) -> Tensor:
        """Draw estimates by the logit of s1's better action, each a mean of samples: `[NUM_ESTIMATES]`."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(4, (NUM_ESTIMATES, num_samples), generator=generator)
        return self.gradients.flatten(0, 1)[:, 0][chosen].mean(dim=1)


def make_estimates(kind: AdvantageKind) -> Estimates:
    """Use `raw` rewards as deltas, or subtract the state's `mean` as baseline: 10 in s1, 1 in s2."""
    deltas = group_advantages(REWARDS, kind)  # a state is a group
    gradients = [[_gradient(deltas, state, action) for action in (0, 1)] for state in (0, 1)]
    return Estimates(deltas, torch.stack([torch.stack(row) for row in gradients]))


def _gradient(deltas: Tensor, state: int, action: int) -> Tensor:
    """Return the gradient of `log pi(action | state) * delta` at logits of 0: `[4]`."""
    logits = torch.zeros(2, 2, requires_grad=True)  # [state, action]
    log_prob = logits.log_softmax(dim=1)[state, action]
    loss = compute_naive_policy_gradient_loss(deltas[state, action].view(1, 1), log_prob.view(1, 1))
    (gradient,) = torch.autograd.grad(-loss.sum(), logits)
    return gradient.flatten()
