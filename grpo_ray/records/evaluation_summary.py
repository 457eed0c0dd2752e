"""The summary of an evaluation, shared by validation during training and by `grpo-ray evaluate`.

`config.evaluation` schedules a run's validation, of which `write_evaluation` writes the files; the command
(tools/evaluation) reads its responses back from examples.parquet. Both call `summarise`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.records.episode_metrics import episode_metrics, facts_in
from grpo_ray.records.json_lines import JsonLines, lines_from_end, parse_line
from grpo_ray.records.rollout_log import write_rollouts
from grpo_ray.records.run_files import step_name
from grpo_ray.types import ScoredGroup

Interval = tuple[float, float]  # 95%: see `bootstrap_intervals`
LEVEL = 0.95
NUM_RESAMPLES = 2000
MAX_DRAWS = 2**22  # indices in memory at a time


class Category(StrEnum):
    """The verdict on a response."""

    CORRECT = "correct"  # format 1, answer 1
    WRONG_ANSWER = "wrong_answer"  # format 1, answer 0
    NO_FORMAT = "no_format"  # format 0
    NOT_GRADED = "not_graded"  # grading failed, for example because it did not end


@dataclass(frozen=True)
class Outcomes:
    """Every response in numbers; each array is `[prompts, samples]`, except `tasks`.

    A response's tokens are those that the policy sampled.
    """

    rewards: np.ndarray  # float64
    format_rewards: np.ndarray
    answer_rewards: np.ndarray
    is_error: np.ndarray  # bool: the response could not be graded
    num_tokens: np.ndarray
    is_truncated: np.ndarray  # bool
    tasks: np.ndarray  # [prompts]: the mixture part that a prompt comes from
    episodes: Sequence[Mapping[str, Any]] = ()  # facts of the responses that are episodes, in any order

    @property
    def is_correct(self) -> np.ndarray:
        return ~self.is_error & (self.format_rewards > 0) & (self.answer_rewards > 0)


@dataclass(frozen=True)
class EvaluationSummary:
    """Means over responses, and four counts that add up to all responses.

    A response that could not be graded counts as wrong in `accuracy`, `format_reward` and pass@k, which are
    therefore lower bounds: too low by at most `num_errors` responses. In `reward` it has the least, at most 0.
    """

    step: int
    version: int  # the newest version that sampled a token
    num_examples: int
    reward: float
    reward_standard_error: float  # over prompts
    format_reward: float
    answer_reward: float
    num_correct: int
    num_wrong_answer: int  # right format, wrong answer
    num_no_format: int
    mean_response_tokens: float
    truncated_frac: float
    num_samples: int  # responses per prompt
    num_errors: int  # responses that could not be graded
    accuracy: float  # share of responses with the right format and answer
    accuracy_interval: Interval
    format_interval: Interval
    pass_at_k: dict[str, float]  # by k
    pass_at_k_intervals: dict[str, Interval]
    median_response_tokens: float
    max_response_tokens: int
    reward_by_task: dict[str, float]  # by mixture part
    accuracy_by_task: dict[str, float]
    episodes: dict[str, float] = field(default_factory=dict)  # metrics of episodes, if there are any

    @property
    def num_responses(self) -> int:
        return self.num_examples * self.num_samples

    @property
    def metrics(self) -> dict[str, float]:
        by_task = {f"eval/reward/{task}": reward for task, reward in self.reward_by_task.items()}
        return {
            "eval/reward": self.reward,
            "eval/format": self.format_reward,
            "eval/answer": self.answer_reward,
            "eval/response_tokens/mean": self.mean_response_tokens,
            "eval/truncated_frac": self.truncated_frac,
            **by_task,
            **{f"eval/{name}": value for name, value in self.episodes.items()},
        }


def summarise(outcomes: Outcomes, step: int = 0, version: int = 0) -> EvaluationSummary:
    """Return the summary of all responses; intervals are over prompts."""
    assert outcomes.rewards.size, "an evaluation has at least one response"
    num_examples, num_samples = outcomes.rewards.shape
    correct = outcomes.is_correct
    ks = powers_of_two(num_samples)
    passes = [pass_at_k(num_samples, correct.sum(axis=1), k) for k in ks]
    per_prompt = np.stack([correct.mean(axis=1), outcomes.format_rewards.mean(axis=1), *passes], axis=1)
    intervals = [(float(low), float(high)) for low, high in bootstrap_intervals(per_prompt)]
    is_graded = ~outcomes.is_error
    # Of its own part: a policy of negative rewards must not gain by errors.
    worst = {task: outcomes.rewards[outcomes.tasks == task].min(initial=0.0) for task in set(outcomes.tasks)}
    least = np.array([[worst[task]] for task in outcomes.tasks])
    rewards = np.where(is_graded, outcomes.rewards, least)
    num_graded, num_correct = int(is_graded.sum()), int(correct.sum())
    num_formatted = int((is_graded & (outcomes.format_rewards > 0)).sum())
    return EvaluationSummary(
        step=step,
        version=version,
        num_examples=num_examples,
        reward=float(rewards.mean()),
        reward_standard_error=standard_error(rewards.mean(axis=1)),
        format_reward=float(outcomes.format_rewards.mean()),
        answer_reward=float(outcomes.answer_rewards.mean()),
        num_correct=num_correct,
        num_wrong_answer=num_formatted - num_correct,
        num_no_format=num_graded - num_formatted,
        mean_response_tokens=float(outcomes.num_tokens.mean()),
        truncated_frac=float(outcomes.is_truncated.mean()),
        num_samples=num_samples,
        num_errors=int(outcomes.is_error.sum()),
        accuracy=float(correct.mean()),
        accuracy_interval=intervals[0],
        format_interval=intervals[1],
        pass_at_k={str(k): float(values.mean()) for k, values in zip(ks, passes, strict=True)},
        pass_at_k_intervals={str(k): interval for k, interval in zip(ks, intervals[2:], strict=True)},
        median_response_tokens=float(np.median(outcomes.num_tokens)),
        max_response_tokens=int(outcomes.num_tokens.max()),
        reward_by_task=_by_task(rewards, outcomes.tasks),
        accuracy_by_task=_by_task(correct, outcomes.tasks),
        episodes=episode_metrics(outcomes.episodes),
    )


def _by_task(values: np.ndarray, tasks: np.ndarray) -> dict[str, float]:
    """Return the mean of each mixture part; empty if the task is no mixture."""
    names = sorted({str(task) for task in tasks} - {""})
    return {name: float(values[tasks == name].mean()) for name in names}


def pass_at_k(num_samples: int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """Return unbiased estimates of the chance that at least one of k responses is correct; `[prompts]` float64.

    1 - C(n - c, k) / C(n, k) for c correct responses of n (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", equation 1). Python's whole numbers do not overflow.

    Args:
        num_correct: `[prompts]` integers between 0 and `num_samples`.
    """
    assert 1 <= k <= num_samples
    counts, inverse = np.unique(num_correct, return_inverse=True)
    draws = math.comb(num_samples, k)
    missed = np.array([math.comb(num_samples - int(count), k) / draws for count in counts])
    return 1.0 - missed[inverse]


def powers_of_two(num_samples: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... and `num_samples` itself."""
    return sorted({1 << exponent for exponent in range(num_samples.bit_length())} | {num_samples})


def bootstrap_intervals(values: np.ndarray) -> np.ndarray:
    """Return 95% percentile intervals of the mean over prompts; `[statistics, 2]` from `[prompts, statistics]`.

    Prompts are resampled rather than responses, because the responses to one prompt are correlated (Efron &
    Tibshirani 1993, chapter 13). If all prompts agree the interval has no width, even with few prompts.
    """
    num_prompts, num_statistics = values.shape
    rng = np.random.default_rng(0)  # the same intervals for the same responses
    means = np.empty((NUM_RESAMPLES, num_statistics))
    at_a_time = max(1, MAX_DRAWS // (num_prompts * num_statistics))
    for start in range(0, NUM_RESAMPLES, at_a_time):
        size = min(at_a_time, NUM_RESAMPLES - start)
        drawn = rng.integers(num_prompts, size=(size, num_prompts))
        means[start : start + size] = values[drawn].mean(axis=1)
    tail = (1.0 - LEVEL) / 2
    intervals: np.ndarray = np.quantile(means, (tail, 1.0 - tail), axis=0).T
    return intervals


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of `[prompts]` values; 0 for one prompt."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


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
        episodes=facts_in(groups),
    )


def summarise_groups(step: int, groups: Sequence[ScoredGroup]) -> EvaluationSummary:
    """Return the summary of the validation at a step."""
    assert groups, "an evaluation has at least one group"
    completions = [completion for group in groups for completion in group.rollout.completions]
    version = max((int(c.versions.max()) for c in completions if c.num_tokens), default=0)
    return summarise(outcomes_of(groups), step, version)


def find_evaluation(folder: str | Path, step: int) -> EvaluationSummary | None:
    """Return the summary of the validation at a step, read from the end of its file; None without one."""
    for _, line in lines_from_end(Path(folder) / "summary.jsonl"):
        row = parse_line(line)
        if row is not None and row["step"] <= step:
            return EvaluationSummary(**row) if row["step"] == step else None
    return None


def write_evaluation(
    folder: str | Path, summary: EvaluationSummary, groups: Sequence[ScoredGroup] | None
) -> str | None:
    """Write `step-000040.parquet`, then append the summary to `summary.jsonl`; return `write_rollouts`' note.

    Without groups no responses are written.

    Raises:
        OSError: a full disk, for example; no line was appended, and the call can be repeated.
    """
    folder = Path(folder)
    path, note = folder / f"{step_name(summary.step)}.parquet", None
    if groups is not None:
        note = write_rollouts(path, summary.step, groups, fsync=True)
    error = JsonLines(folder / "summary.jsonl").append(asdict(summary))
    if error is not None:
        raise OSError(error)
    return note
