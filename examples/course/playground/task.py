"""The lecture's task: a few prompts of n numbers, each to be answered with the sorted numbers.

The possible responses are few enough to compute all of their rewards beforehand. So a policy's expected reward
and its probability of right responses are exact, and plots of them have no sampling noise.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_ray.rewards.builtin import sort_distance_reward, sort_inclusion_ordering_reward

RewardFunction = Callable[[Sequence[int], Sequence[int]], float]
REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "distance": sort_distance_reward,
    "inclusion_ordering": sort_inclusion_ordering_reward,
}
LECTURE_PROMPTS = [[1, 0, 2], [3, 2, 4], [1, 2, 3]]


@dataclass(frozen=True)
class SortingTask:
    """Prompts, and the rewards of all R = `vocab_size ** numbers` responses, in the order of their digits."""

    prompts: Tensor
    """`[batch, pos]` integers."""
    rewards: Tensor
    """`[batch, R]`."""
    answers: Tensor
    """`[batch]` integers: the index of the sorted prompt among the responses."""
    vocab_size: int

    def rewards_of(self, responses: Tensor) -> Tensor:
        """Look up rewards: `[batch, response, pos]` integers to `[batch, response]`."""
        return self.rewards.gather(1, self._index(responses))

    def expected_reward(self, log_probs: Tensor) -> float:
        """Return the mean over prompts of `sum over responses of pi(response | prompt) * reward`.

        Args:
            log_probs: `[batch, pos, vocab]`, in nats.
        """
        return (self._joint(log_probs) * self.rewards).sum(dim=1).mean().item()

    def share_right(self, log_probs: Tensor) -> float:
        """Return the probability of the sorted prompt, mean over prompts; log_probs as in `expected_reward`."""
        return self._joint(log_probs).gather(1, self.answers[:, None]).mean().item()

    @property
    def best_reward(self) -> float:
        """Reward of the sorted prompts, mean over them."""
        return self.rewards.gather(1, self.answers[:, None]).mean().item()

    def _index(self, responses: Tensor) -> Tensor:
        return _index(responses, self.vocab_size)

    def _joint(self, log_probs: Tensor) -> Tensor:
        """Return the probability of every response: `[batch, pos, vocab]` to `[batch, R]`."""
        joint = torch.ones(len(log_probs), 1)
        for position in log_probs.exp().unbind(dim=1):  # [batch, vocab]
            joint = (joint[:, :, None] * position[:, None, :]).flatten(1)
        return joint


def make_task(reward: str, numbers: int) -> SortingTask:
    """Use the lecture's prompts for three numbers, otherwise draw three with n distinct numbers below n + 2."""
    vocab_size = numbers + 2
    rng = random.Random(f"playground/{numbers}")
    prompts = LECTURE_PROMPTS if numbers == 3 else [rng.sample(range(vocab_size), numbers) for _ in range(3)]
    responses = torch.cartesian_prod(*[torch.arange(vocab_size)] * numbers).tolist()  # R lists
    function = REWARD_FUNCTIONS[reward]
    rewards = [[function(prompt, response) for response in responses] for prompt in prompts]
    answers = _index(torch.tensor(prompts).sort(dim=1).values, vocab_size)
    return SortingTask(torch.tensor(prompts), torch.tensor(rewards), answers, vocab_size)


def _index(responses: Tensor, vocab_size: int) -> Tensor:
    """Read responses as numbers of base vocab_size: `[..., pos]` to `[...]`."""
    places = vocab_size ** torch.arange(responses.shape[-1]).flip(0)
    return (responses * places).sum(dim=-1)
