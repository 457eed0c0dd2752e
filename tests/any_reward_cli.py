"""The command line with a reward that a random model earns half of the time, so every step has a gradient."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_ray.cluster import kinds
from grpo_ray.config import Config
from grpo_ray.core import scorer
from grpo_ray.core.scorer import Scorer
from grpo_ray.rewards import trial
from grpo_ray.rewards.grader import Grader
from grpo_ray.tools.audit import rollouts
from grpo_ray.tools.cli import main


class ParityGrader(Grader):
    def __init__(self, rewards: Any, config: Any) -> None:
        super().__init__({}, config)  # without processes

    def grade(self, task: str, pairs: Sequence[tuple[str, str]], item: Any = None) -> list[Any]:
        values = [float(sum(response.encode()) % 2) for response, _ in pairs]
        return [{"reward": value, "format_reward": 1.0, "answer_reward": value} for value in values]


def patch_graders(patch: pytest.MonkeyPatch) -> None:
    for module in (scorer, rollouts, trial):
        patch.setattr(module, "Grader", ParityGrader)


class AnyRewardScorer(Scorer):
    def __init__(self, config: Config, secrets: Mapping[str, str]) -> None:
        super().__init__(config, secrets)
        self._grader = ParityGrader(None, config.scorer)


KIND = replace(kinds.SCORER, place=AnyRewardScorer)

if __name__ == "__main__":
    kinds.SCORER = KIND
    sys.exit(main(sys.argv[1:]))
