"""The lecture's training loop: sample responses, compute their deltas, take a few gradient steps on them."""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from examples.course.playground.model import SortingModel, response_log_probs, sample_responses
from examples.course.playground.settings import DELTAS, Settings
from examples.course.playground.task import SortingTask
from grpo_ray.objectives import LossType, Objective, group_advantages, policy_gradient_step

LOSS_TYPES: dict[str, LossType] = {
    "naive": "reinforce_with_baseline",
    "unclipped": "unclipped",
    "clipped": "grpo_clip",
}
ADVANTAGE_EPS = 1e-5  # the lecture's


@dataclass(frozen=True)
class Point:
    """The policy after a step; all values but `clip_fraction` are exact, over every possible response."""

    step: int
    reward: float
    """Expected reward."""
    right: float
    """Probability of the sorted prompt."""
    kl: float
    """KL(policy || reference) of a response, in nats; before the reference is refreshed."""
    clip_fraction: float
    """Share of tokens that lost their gradient to the clip, at the step's last update."""


def train_model(settings: Settings, task: SortingTask, seed: int) -> list[Point]:
    """Train a new model; return the points before training and after each step. The seed decides all draws."""
    generator = torch.Generator().manual_seed(seed)
    model = SortingModel(task.vocab_size, settings.dim, settings.numbers, settings.embedding_std, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    old = reference = _frozen_log_probs(model, task)  # [batch, pos, vocab], all that a policy is on this task
    points = [_point(task, old, reference, 0, clip_fraction=0.0)]
    for step in range(settings.steps):
        if step % settings.reference_every == 0:
            reference = old
        responses = sample_responses(old, settings.responses, generator)  # [batch, response, pos]
        rewards = task.rewards_of(responses)  # [batch, response]
        deltas = group_advantages(rewards, DELTAS[settings.deltas], advantage_eps=ADVANTAGE_EPS)
        for _ in range(settings.updates):
            loss, clip_fraction = compute_loss(model(task.prompts), old, reference, responses, deltas, settings)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        old = _frozen_log_probs(model, task)
        points.append(_point(task, old, reference, step + 1, clip_fraction))
    return points


def compute_loss(
    policy: Tensor, old: Tensor, reference: Tensor, responses: Tensor, deltas: Tensor, settings: Settings
) -> tuple[Tensor, float]:
    """Return the mean over responses of their mean token loss plus KL penalty, and the share of clipped tokens.

    Args:
        policy, old, reference: log-probabilities `[batch, pos, vocab]`, in nats; only the first has a gradient.
        responses: `[batch, response, pos]` integers.
        deltas: `[batch, response]`.
        settings: the loss and its constants.
    """
    policy_tokens, old_tokens, reference_tokens = (
        rearrange(response_log_probs(log_probs, responses), "batch response pos -> (batch response) pos")
        for log_probs in (policy, old, reference)
    )
    num_responses, num_positions = policy_tokens.shape
    objective = Objective(
        LOSS_TYPES[settings.loss],
        "sequence_mean",
        cliprange=settings.clip if settings.loss == "clipped" else None,
        kl_coefficient=settings.kl
        * num_positions,  # the penalty is on a response's KL, the sum over its tokens
    )
    loss, sums = policy_gradient_step(
        policy_tokens,
        torch.ones_like(policy_tokens, dtype=torch.bool),
        objective=objective,
        denominator=num_responses,
        advantages=rearrange(deltas, "batch response -> (batch response) 1"),
        old_log_probs=old_tokens,
        reference_log_probs=reference_tokens,
    )
    num_clipped = sums.get("num_clipped", torch.tensor(0))
    return loss, (num_clipped / sums["num_tokens"]).item()


@torch.no_grad()
def _frozen_log_probs(model: SortingModel, task: SortingTask) -> Tensor:
    log_probs: Tensor = model(task.prompts)
    return log_probs


def _point(task: SortingTask, policy: Tensor, reference: Tensor, step: int, clip_fraction: float) -> Point:
    kl = (policy.exp() * (policy - reference)).sum(dim=(1, 2)).mean().item()  # positions are independent
    return Point(step, task.expected_reward(policy), task.share_right(policy), kl, clip_fraction)
