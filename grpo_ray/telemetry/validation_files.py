"""What a run keeps of its validations: their groups, their summaries, and a few for people to read."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.telemetry.evaluation_summary import EvaluationSummary, Outcomes, summarise
from grpo_ray.telemetry.json_lines import JsonLines
from grpo_ray.telemetry.rollout_log import write_rollouts
from grpo_ray.telemetry.run_files import step_name
from grpo_ray.types import ScoredGroup


@dataclass(frozen=True)
class ReadableRollout:
    """One example for people to read."""

    prompt: str
    response: str
    ground_truth: str
    reward: float


def outcomes_of(groups: Sequence[ScoredGroup]) -> Outcomes:
    """The groups' responses in numbers; all groups have as many."""

    def stacked(values: Callable[[ScoredGroup], Any], dtype: type) -> np.ndarray:
        return np.array([values(group) for group in groups], dtype=dtype)

    return Outcomes(
        rewards=stacked(lambda group: group.rewards, np.float64),
        format_rewards=stacked(lambda group: group.format_rewards, np.float64),
        answer_rewards=stacked(lambda group: group.answer_rewards, np.float64),
        is_error=stacked(lambda group: [i in group.errors for i in range(len(group.rewards))], np.bool_),
        num_tokens=stacked(lambda group: [len(c.token_ids) for c in group.rollout.completions], np.int64),
        is_truncated=stacked(lambda group: [c.is_truncated for c in group.rollout.completions], np.bool_),
        tasks=np.array([group.rollout.item.task for group in groups]),
    )


def summarise_groups(step: int, groups: Sequence[ScoredGroup]) -> EvaluationSummary:
    """The validation at a step."""
    assert groups, "an evaluation has at least one group"
    completions = [completion for group in groups for completion in group.rollout.completions]
    version = max((int(c.versions.max()) for c in completions if len(c.versions)), default=0)
    return summarise(outcomes_of(groups), step, version)


def write_evaluation(folder: str | Path, summary: EvaluationSummary, groups: Sequence[ScoredGroup]) -> None:
    """Write `step-000040.parquet`, and the summary as a line of `summary.jsonl`.

    Raises:
        OSError: as on a full disk; there is no line then, and it can be called again.
    """
    folder = Path(folder)
    write_rollouts(folder / f"{step_name(summary.step)}.parquet", summary.step, groups)
    error = JsonLines(folder / "summary.jsonl").append(asdict(summary))
    if error is not None:
        raise OSError(error)


def sample_rollouts(groups: Sequence[ScoredGroup], num_rollouts: int) -> list[ReadableRollout]:
    """First completions of prompts evenly spread over the set: the same prompts at every evaluation."""
    ordered = sorted(groups, key=lambda group: group.group_id)
    num_rollouts = min(num_rollouts, len(ordered))
    chosen = [ordered[index * len(ordered) // num_rollouts] for index in range(num_rollouts)]
    return [
        ReadableRollout(
            prompt=group.rollout.item.prompt,
            response=group.rollout.completions[0].text,
            ground_truth=group.rollout.item.ground_truth,
            reward=float(group.rewards[0]),
        )
        for group in chosen
    ]
