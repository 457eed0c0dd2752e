"""Scorer: verified rewards and group advantages."""

import numpy as np
import torch

from grpo_ray.algorithms import group_advantages
from grpo_ray.config import AlgorithmConfig
from grpo_ray.rewards import get_reward_fn
from grpo_ray.types import RolloutGroup, ScoredGroup


class Scorer:
    def __init__(self, reward: str, config: AlgorithmConfig) -> None:
        self._reward_fn = get_reward_fn(reward)
        self._config = config

    def ready(self) -> bool:
        return True

    def score(self, group: RolloutGroup) -> ScoredGroup:
        """Rewards of each completion, and what they are worth beside their group's."""
        truth = group.item.ground_truth
        scores = [self._reward_fn(completion.text, truth) for completion in group.completions]
        rewards = np.array([score["reward"] for score in scores], dtype=np.float32)
        advantages = group_advantages(
            torch.from_numpy(rewards)[None], self._config.advantage_eps, self._config.normalize_by_std
        )
        return ScoredGroup(
            rollout=group,
            rewards=rewards,
            format_rewards=np.array([score["format_reward"] for score in scores], dtype=np.float32),
            answer_rewards=np.array([score["answer_reward"] for score in scores], dtype=np.float32),
            advantages=advantages[0].numpy(),
        )
