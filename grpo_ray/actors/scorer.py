"""Scorer: verified rewards and group advantages."""

import logging
import time

import numpy as np
import torch

from grpo_ray.algorithms import group_advantages, overlong_penalties
from grpo_ray.config import ScorerConfig
from grpo_ray.config_algorithm import AlgorithmConfig
from grpo_ray.rewards import make_reward_fn
from grpo_ray.rewards.base import verdict
from grpo_ray.rewards.isolated import ScoringError
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.types import RolloutGroup, ScoredGroup, ScoreFacts


class Scorer:
    def __init__(self, reward: str, algorithm: AlgorithmConfig, config: ScorerConfig, max_tokens: int) -> None:
        """`max_tokens` is the longest response that may be sampled."""
        self._reward_fn = make_reward_fn(reward, config.timeout_s, config.memory_gib)
        self._algorithm, self._max_tokens = algorithm, max_tokens

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
        lengths = np.array([len(completion.token_ids) for completion in group.completions])
        advantages = advantages_of(rewards, lengths, self._algorithm, self._max_tokens)
        scored = ScoredGroup(group, rewards, formats, answers, advantages, num_errors)
        return scored, ScoreFacts(time.perf_counter() - started, resident_bytes())


def advantages_of(
    rewards: np.ndarray, lengths: np.ndarray, algorithm: AlgorithmConfig, max_tokens: int
) -> np.ndarray:
    """What a group's rewards are worth, from its `[G]` rewards and lengths in tokens; `[G]` float32.

    Overlong responses lose reward first, so a group that is all right can still prefer its shorter ones.
    """
    penalties = overlong_penalties(
        torch.from_numpy(lengths), max_tokens, algorithm.overlong_buffer_tokens, algorithm.overlong_penalty
    )
    shaped = torch.from_numpy(rewards) + penalties
    kind = algorithm.advantage_kind
    if kind == "leave_one_out" and len(rewards) == 1:  # a validation's: nothing is learned from it
        kind = "mean"
    advantages = group_advantages(shaped[None], kind, advantage_eps=algorithm.advantage_eps, std=algorithm.std)
    return advantages[0].numpy()
