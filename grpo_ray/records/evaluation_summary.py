"""The summary of an evaluation, shared by validation during training and by `grpo-ray evaluate`.

`config.evaluation` schedules a run's validation, and validation_files.py summarises its groups; the command
(tools/evaluation) reads its responses back from examples.parquet. Both call `summarise`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from grpo_ray.records.episode_metrics import EpisodeFacts, episode_metrics
from grpo_ray.records.statistics import bootstrap_intervals, pass_at_k, powers_of_two, standard_error

Interval = tuple[float, float]  # 95%: see `bootstrap_intervals`


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
    episodes: tuple[EpisodeFacts, ...] = ()  # of the responses that are episodes, in any order

    @property
    def is_correct(self) -> np.ndarray:
        return ~self.is_error & (self.format_rewards > 0) & (self.answer_rewards > 0)

    @property
    def is_wrong_answer(self) -> np.ndarray:
        return ~self.is_error & (self.format_rewards > 0) & (self.answer_rewards <= 0)


@dataclass(frozen=True)
class EvaluationSummary:
    """Means over responses, and four counts that add up to all responses.

    A response that could not be graded counts as wrong in `accuracy`, `format_reward` and pass@k, which are
    therefore lower bounds: too low by at most `num_errors` responses.
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
    num_correct, num_wrong = int(correct.sum()), int(outcomes.is_wrong_answer.sum())
    return EvaluationSummary(
        step=step,
        version=version,
        num_examples=num_examples,
        reward=float(outcomes.rewards.mean()),
        reward_standard_error=standard_error(outcomes.rewards.mean(axis=1)),
        format_reward=float(outcomes.format_rewards.mean()),
        answer_reward=float(outcomes.answer_rewards.mean()),
        num_correct=num_correct,
        num_wrong_answer=num_wrong,
        num_no_format=int(is_graded.sum()) - num_correct - num_wrong,
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
        reward_by_task=_by_task(outcomes.rewards, outcomes.tasks),
        accuracy_by_task=_by_task(correct, outcomes.tasks),
        episodes=episode_metrics(outcomes.episodes),
    )


def _by_task(values: np.ndarray, tasks: np.ndarray) -> dict[str, float]:
    """Return the mean of each mixture part; empty if the task is no mixture."""
    names = sorted({str(task) for task in tasks} - {""})
    return {name: float(values[tasks == name].mean()) for name in names}
