"""What the responses of one evaluation add up to: while training, and by `grpo-ray evaluate`."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from grpo_ray.telemetry.statistics import bootstrap_intervals, pass_at_k, powers_of_two, standard_error

Interval = tuple[float, float]  # 95%: see `bootstrap_intervals`


class Category(StrEnum):
    """What became of a response."""

    CORRECT = "correct"  # format 1, answer 1
    WRONG_ANSWER = "wrong_answer"  # format 1, answer 0
    NO_FORMAT = "no_format"  # format 0
    NOT_GRADED = "not_graded"  # grading failed, as on a computation without end


@dataclass(frozen=True)
class Outcomes:
    """Every response in numbers; each array is `[prompts, samples]`, but for `tasks`."""

    rewards: np.ndarray  # float64
    format_rewards: np.ndarray
    answer_rewards: np.ndarray
    is_error: np.ndarray  # bool: it could not be graded
    num_tokens: np.ndarray
    is_truncated: np.ndarray  # bool
    tasks: np.ndarray  # [prompts]: the part of a mixture that a prompt comes from

    @property
    def is_correct(self) -> np.ndarray:
        return ~self.is_error & (self.format_rewards > 0) & (self.answer_rewards > 0)

    @property
    def is_wrong_answer(self) -> np.ndarray:
        return ~self.is_error & (self.format_rewards > 0) & (self.answer_rewards <= 0)


@dataclass(frozen=True)
class EvaluationSummary:
    """Means are over responses; the four counts add up to all of them.

    A response that could not be graded is none of the right ones: it stays among those that `accuracy`,
    `format_reward` and pass@k divide by, so they are lower bounds, low by `num_errors` responses at most.
    """

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
    # Runs of older versions have no more than the above in their summary.jsonl.
    num_samples: int = 1  # responses a prompt
    num_errors: int = 0  # could not be graded
    accuracy: float = 0.0  # share of responses in the format with a right answer
    accuracy_interval: Interval = (0.0, 0.0)
    format_interval: Interval = (0.0, 0.0)
    pass_at_k: dict[str, float] = field(default_factory=dict)  # by k
    pass_at_k_intervals: dict[str, Interval] = field(default_factory=dict)
    median_response_tokens: float = 0.0
    max_response_tokens: int = 0
    reward_by_task: dict[str, float] = field(default_factory=dict)  # of a mixture's parts
    accuracy_by_task: dict[str, float] = field(default_factory=dict)

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
        }


def summarise(outcomes: Outcomes, step: int = 0, version: int = 0) -> EvaluationSummary:
    """Of all responses; intervals are over prompts."""
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
    )


def _by_task(values: np.ndarray, tasks: np.ndarray) -> dict[str, float]:
    """Means of a mixture's parts; empty where there is one."""
    names = sorted({str(task) for task in tasks} - {""})
    return {name: float(values[tasks == name].mean()) for name in names}
