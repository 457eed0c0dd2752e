"""Scorer: verified rewards and group advantages."""

import logging
import time

import numpy as np
import torch

from grpo_ray.algorithms import group_advantages
from grpo_ray.config import AlgorithmConfig, ScorerConfig
from grpo_ray.rewards import make_reward_fn
from grpo_ray.rewards.base import verdict
from grpo_ray.rewards.isolated import ScoringError
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.types import RolloutGroup, ScoredGroup, ScoreFacts


class Scorer:
    def __init__(self, reward: str, algorithm: AlgorithmConfig, config: ScorerConfig) -> None:
        self._reward_fn = make_reward_fn(reward, config.timeout_s, config.memory_gib)
        self._algorithm = algorithm

    def ready(self) -> bool:
        return True

    def score(self, group: RolloutGroup) -> tuple[ScoredGroup, ScoreFacts]:
        """Rewards of each completion, and what they are worth beside their group's."""
        started = time.perf_counter()
        scores, num_errors = [], 0
        for completion in group.completions:
            try:
                scores.append(self._reward_fn(completion.text, group.item.ground_truth))
            except ScoringError as error:
                logging.warning("group %d: %s", group.item.group_id, error)
                scores.append(verdict(has_format=False, is_right=False))
                num_errors += 1
        rewards, formats, answers = (
            np.array([score[name] for score in scores], dtype=np.float32)
            for name in ("reward", "format_reward", "answer_reward")
        )
        advantages = group_advantages(
            torch.from_numpy(rewards)[None], self._algorithm.advantage_eps, self._algorithm.normalize_by_std
        )
        scored = ScoredGroup(group, rewards, formats, answers, advantages[0].numpy(), num_errors)
        return scored, ScoreFacts(time.perf_counter() - started, resident_bytes())
