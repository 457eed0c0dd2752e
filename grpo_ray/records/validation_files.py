"""Files of a run's validations: their groups as Parquet, their summaries as JSON lines."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.records.episode_metrics import episodes_in
from grpo_ray.records.evaluation_summary import EvaluationSummary, Outcomes, summarise
from grpo_ray.records.json_lines import JsonLines, lines_from_end, parse_line
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import step_name
from grpo_ray.types import ScoredGroup


def outcomes_of(groups: Sequence[ScoredGroup]) -> Outcomes:
    """Return the groups' responses as arrays; every group has the same number of samples."""

    def stacked(values: Callable[[ScoredGroup], Any], dtype: type) -> np.ndarray:
        return np.array([values(group) for group in groups], dtype=dtype)

    return Outcomes(
        rewards=stacked(lambda group: group.rewards, np.float64),
        format_rewards=stacked(lambda group: group.format_rewards, np.float64),
        answer_rewards=stacked(lambda group: group.answer_rewards, np.float64),
        is_error=stacked(lambda group: ~group.is_graded, np.bool_),
        num_tokens=stacked(lambda group: [c.num_tokens for c in group.rollout.completions], np.int64),
        is_truncated=stacked(lambda group: [c.is_truncated for c in group.rollout.completions], np.bool_),
        tasks=np.array([group.rollout.item.task for group in groups]),
        episodes=tuple(episodes_in(groups)),
    )


def summarise_groups(step: int, groups: Sequence[ScoredGroup]) -> EvaluationSummary:
    """Return the summary of the validation at a step."""
    assert groups, "an evaluation has at least one group"
    completions = [completion for group in groups for completion in group.rollout.completions]
    version = max((int(c.versions.max()) for c in completions if c.num_tokens), default=0)
    return summarise(outcomes_of(groups), step, version)


def find_evaluation(folder: str | Path, step: int) -> EvaluationSummary | None:
    """Return the summary of the validation at a step, read from the end of its file; None without one."""
    path = Path(folder) / "summary.jsonl"
    for _, line in lines_from_end(path) if path.exists() else ():
        row = parse_line(line)
        if row is not None and row["step"] <= step:
            return EvaluationSummary(**row) if row["step"] == step else None
    return None


def write_evaluation(
    folder: str | Path, summary: EvaluationSummary, groups: Sequence[ScoredGroup]
) -> str | None:
    """Write `step-000040.parquet`, then append the summary to `summary.jsonl`; return `write_rollouts`' note.

    Raises:
        OSError: a full disk, for example; no line was appended, and the call can be repeated.
    """
    folder = Path(folder)
    path = folder / f"{step_name(summary.step)}.parquet"
    note = write_rollouts(path, summary.step, groups, fsync=True)
    error = JsonLines(folder / "summary.jsonl").append(asdict(summary))
    if error is not None:
        raise OSError(error)
    return note
