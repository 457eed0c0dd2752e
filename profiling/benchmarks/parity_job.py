"""The command line with a reward that a random model earns half of the time, so that it trains."""

import sys
from collections.abc import Sequence
from typing import Any

from grpo_ray import hosting
from grpo_ray.actors.scorer import Scorer
from grpo_ray.cli import main
from grpo_ray.rewards.grader import Grader


class ParityGrader(Grader):
    def grade(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[Any]:
        values = [float(sum(response.encode()) % 2) for response, _ in pairs]
        return [dict.fromkeys(("reward", "format_reward", "answer_reward"), value) for value in values]


class ParityScorer(Scorer):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._grader = ParityGrader(args[0], args[2])


if __name__ == "__main__":
    hosting.Scorer = ParityScorer  # type: ignore[misc]
    sys.exit(main())
