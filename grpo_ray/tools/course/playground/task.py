"""The lecture's task: a few prompts of n numbers, each to be answered with them in order.

There are so few responses that the reward of every one is worked out once. So a policy's expected reward and
its share of right responses are exact: what a plot shows of them is no noise of sampling.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_ray.rewards.sorting import sort_distance_reward, sort_inclusion_ordering_reward

RewardFunction = Callable[[Sequence[int], Sequence[int]], float]
REWARD_FUNCTIONS: dict[str, RewardFunction] = {
    "distance": sort_distance_reward,
    "inclusion_ordering": sort_inclusion_ordering_reward,
}
LECTURE_PROMPTS = [[1, 0, 2], [3, 2, 4], [1, 2, 3]]


@dataclass(frozen=True)
class SortingTask:
    """R is the number of possible responses, `vocab_size ** numbers`, ordered as numbers of that base."""

    prompts: Tensor
    """`[batch, pos]` integers."""
    rewards: Tensor
    """`[batch, R]`."""
    answers: Tensor
    """`[batch]` integers: which of the responses is the sorted prompt."""
    vocab_size: int

    def rewards_of(self, responses: Tensor) -> Tensor:
        """`[batch, response, pos]` integers to `[batch, response]`."""
        return self.rewards.gather(1, self._index(responses))

    def expected_reward(self, log_probs: Tensor) -> float:
        """The mean over prompts of `sum over responses of pi(response | prompt) * reward`.

        Args:
            log_probs: `[batch, pos, vocab]`, nats.
        """
        return (self._joint(log_probs) * self.rewards).sum(dim=1).mean().item()

    def share_right(self, log_probs: Tensor) -> float:
        """The probability of the sorted prompt, mean over prompts; log_probs as in `expected_reward`."""
        return self._joint(log_probs).gather(1, self.answers[:, None]).mean().item()

    @property
    def best_reward(self) -> float:
        """Of the sorted prompts, mean over them."""
        return self.rewards.gather(1, self.answers[:, None]).mean().item()

    def _index(self, responses: Tensor) -> Tensor:
        return _index(responses, self.vocab_size)

    def _joint(self, log_probs: Tensor) -> Tensor:
        """`[batch, pos, vocab]` to the probability of every response, `[batch, R]`."""
        joint = torch.ones(len(log_probs), 1)
        for position in log_probs.exp().unbind(dim=1):  # [batch, vocab]
            joint = (joint[:, :, None] * position[:, None, :]).flatten(1)
        return joint


def make_task(reward: str, numbers: int) -> SortingTask:
    """The lecture's prompts for three numbers, else three drawn ones of n distinct numbers below n + 2."""
    vocab_size = numbers + 2
    rng = random.Random(f"playground/{numbers}")
    prompts = LECTURE_PROMPTS if numbers == 3 else [rng.sample(range(vocab_size), numbers) for _ in range(3)]
    responses = torch.cartesian_prod(*[torch.arange(vocab_size)] * numbers).tolist()  # R lists
    function = REWARD_FUNCTIONS[reward]
    rewards = [[function(prompt, response) for response in responses] for prompt in prompts]
    answers = _index(torch.tensor(prompts).sort(dim=1).values, vocab_size)
    return SortingTask(torch.tensor(prompts), torch.tensor(rewards), answers, vocab_size)


def _index(responses: Tensor, vocab_size: int) -> Tensor:
    """`[..., pos]` to `[...]`: the response read as a number of base vocab_size."""
    places = vocab_size ** torch.arange(responses.shape[-1]).flip(0)
    return (responses * places).sum(dim=-1)
