"""Validation: what the scored groups of one evaluation add up to, and the files they leave."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from grpo_ray.telemetry.json_lines import JsonLines
from grpo_ray.telemetry.rollout_log import write_rollouts
from grpo_ray.telemetry.run_files import step_name
from grpo_ray.types import ScoredGroup


@dataclass(frozen=True)
class EvaluationSummary:
    """Means are over completions; the three counts add up to all of them."""

    step: int
    version: int  # the newest version that sampled a token
    num_examples: int
    reward: float
    reward_standard_error: float  # over prompts
    format_reward: float
    answer_reward: float
    num_correct: int
    num_wrong_answer: int  # in the format, answer wrong
    num_no_format: int
    mean_response_tokens: float
    truncated_frac: float

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "eval/reward": self.reward,
            "eval/format": self.format_reward,
            "eval/answer": self.answer_reward,
            "eval/response_tokens/mean": self.mean_response_tokens,
            "eval/truncated_frac": self.truncated_frac,
        }


@dataclass(frozen=True)
class ReadableRollout:
    """One example for people to read."""

    prompt: str
    response: str
    ground_truth: str
    reward: float


def summarise(step: int, groups: Sequence[ScoredGroup]) -> EvaluationSummary:
    assert groups, "an evaluation has at least one group"
    completions = [completion for group in groups for completion in group.rollout.completions]
    rewards, formats, answers = (
        np.concatenate([getattr(group, name) for group in groups]).astype(np.float64)
        for name in ("rewards", "format_rewards", "answer_rewards")
    )
    has_format, is_right = formats > 0, answers > 0
    return EvaluationSummary(
        step=step,
        version=max((int(c.versions.max()) for c in completions if len(c.versions)), default=0),
        num_examples=len(groups),
        reward=float(rewards.mean()),
        reward_standard_error=_standard_error(groups),
        format_reward=float(formats.mean()),
        answer_reward=float(answers.mean()),
        num_correct=int((has_format & is_right).sum()),
        num_wrong_answer=int((has_format & ~is_right).sum()),
        num_no_format=int((~has_format).sum()),
        mean_response_tokens=float(np.mean([len(completion.token_ids) for completion in completions])),
        truncated_frac=float(np.mean([completion.is_truncated for completion in completions])),
    )


def _standard_error(groups: Sequence[ScoredGroup]) -> float:
    """Of the mean over prompts: completions of one prompt are alike and do not count as independent."""
    means = [float(group.rewards.mean()) for group in groups]
    return float(np.std(means, ddof=1)) / math.sqrt(len(means)) if len(means) > 1 else 0.0


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
