"""`grpo-ray` with two faults that only the process itself can cause; profiling/chaos.py starts it.

    python profiling/chaos_driver.py train CONFIG [section.key=value ...]    or    resume RUN

A file in the folder GRPO_RAY_CHAOS_TRIGGERS requests one fault and is removed as the fault happens:
`poison_reward` (the grading of one response fails) or `nan_gradient` (the gradient of one update is NaN).
"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_ray.actors.learner import Learner
from grpo_ray.actors.scorer import Scorer
from grpo_ray.cluster import hosting
from grpo_ray.policy.microbatch import TrainSequence
from grpo_ray.rewards.grader import Grader
from grpo_ray.rewards.isolation.pool import ScoringError
from grpo_ray.tools.cli import main

TRIGGERS = "GRPO_RAY_CHAOS_TRIGGERS"


def is_requested(fault: str) -> bool:
    """Return True once per file."""
    try:
        (Path(os.environ[TRIGGERS]) / fault).unlink()
    except FileNotFoundError:
        return False
    return True


class ChaosGrader(Grader):
    def grade(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        results = super().grade(task, pairs)
        if is_requested("poison_reward"):
            results[0] = ScoringError("chaos: the grading of this response fails")
        return results


class ChaosScorer(Scorer):
    def __init__(self, rewards: Mapping[str, Any], algorithm: Any, config: Any, max_tokens: int) -> None:
        super().__init__({}, algorithm, config, max_tokens)
        self._grader = ChaosGrader(rewards, config)


class ChaosLearner(Learner):
    def accumulate_gradient(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        sums = super().accumulate_gradient(sequences)
        if is_requested("nan_gradient"):
            weights = next(self.model.parameters())
            weights.grad = torch.full_like(weights, float("nan"))
        return sums


if __name__ == "__main__":  # classes of __main__ travel to the actors by value
    hosting.Scorer, hosting.Learner = ChaosScorer, ChaosLearner  # type: ignore[misc,assignment]
    sys.exit(main())
