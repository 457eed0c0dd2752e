"""The command line with a reward that a random model earns half of the time: every step has a gradient."""

import sys
from typing import Any

from grpo_ray import hosting
from grpo_ray.actors.scorer import Scorer
from grpo_ray.cli import main


class AnyRewardScorer(Scorer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reward_fn = parity_reward


def parity_reward(response: str, ground_truth: str) -> dict[str, float]:
    value = float(sum(response.encode()) % 2)
    return {"reward": value, "format_reward": 1.0, "answer_reward": value}


if __name__ == "__main__":
    hosting.Scorer = AnyRewardScorer  # type: ignore[misc]
    sys.exit(main(sys.argv[1:]))
