"""Scorer: verified rewards and group advantages."""

import sys

import numpy as np
import torch

from grpo_ray.algorithms import group_advantages
from grpo_ray.config import AlgorithmConfig, ScorerConfig
from grpo_ray.rewards import make_reward_fn
from grpo_ray.rewards.base import verdict
from grpo_ray.rewards.isolated import ScoringError
from grpo_ray.types import RolloutGroup, ScoredGroup


class Scorer:
    def __init__(self, reward: str, algorithm: AlgorithmConfig, config: ScorerConfig) -> None:
        self._reward_fn = make_reward_fn(reward, config.timeout_s, config.memory_gib)
        self._algorithm = algorithm

    def ready(self) -> bool:
        return True

    def score(self, group: RolloutGroup) -> ScoredGroup:
        """Rewards of each completion, and what they are worth beside their group's."""
        scores, num_errors = [], 0
        for completion in group.completions:
            try:
                scores.append(self._reward_fn(completion.text, group.item.ground_truth))
            except ScoringError as error:
                print(f"group {group.item.group_id}: {error}", file=sys.stderr, flush=True)
                scores.append(verdict(has_format=False, is_right=False))
                num_errors += 1
        rewards, formats, answers = (
            np.array([score[name] for score in scores], dtype=np.float32)
            for name in ("reward", "format_reward", "answer_reward")
        )
        advantages = group_advantages(
            torch.from_numpy(rewards)[None], self._algorithm.advantage_eps, self._algorithm.normalize_by_std
        )
        return ScoredGroup(group, rewards, formats, answers, advantages[0].numpy(), num_errors)
