"""The Grader of a run's answers, which the Scorer, the audit and the evaluation share."""

from collections.abc import Mapping, Sequence

from grpo_ray.config import ScorerConfig
from grpo_ray.config.reward import Reward
from grpo_ray.rewards.base import RewardFn, Scores, Ungradable
from grpo_ray.rewards.configured import get_reward_fn, get_wrong_fn, needs_isolation
from grpo_ray.rewards.isolation.pool import Result, RewardPool, ScoringError
from grpo_ray.rewards.isolation.protection import protection_here
from grpo_ray.rewards.isolation.worker import try_to_grade


class Grader:
    """A grader of answers by their task's reward: in a RewardPool, or in this process if it cannot run away."""

    def __init__(self, rewards: Mapping[str, Reward], config: ScorerConfig) -> None:
        """
        Args:
            rewards: each task's reward, by the task's name (`config.task.rewards`).
        """
        isolated = {task: reward for task, reward in rewards.items() if needs_isolation(reward)}
        self._reward_fns = {
            task: get_reward_fn(reward) for task, reward in rewards.items() if task not in isolated
        }
        self._wrong_fns: dict[str, RewardFn | None] = {
            task: get_wrong_fn(reward, config.ungradable_reward) for task, reward in rewards.items()
        }
        self._pool = None
        if isolated:
            self._pool = RewardPool(
                isolated, config.num_workers, config.timeout_s, config.memory_gib, config.readable_paths
            )

    def start(self) -> None:
        """Wait until answers can be graded.

        Raises:
            RunError: workers cannot be started; the message says why.
        """
        if self._pool is not None:
            self._pool.start()

    @property
    def notices(self) -> tuple[str, ...]:
        """Gaps in the isolation of the workers on this machine, if there are workers; at most one line."""
        return protection_here().notices if self._pool is not None else ()

    def grade(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[Result]:
        """Return, in order, the scores of each (response, ground truth), or the reason why it has none.

        An answer that is the cause itself is Ungradable, with the scores of a wrong one.

        Raises:
            RunError: workers cannot be started.
        """
        reward_fn = self._reward_fns.get(task)
        if reward_fn is not None:
            results = [_in_process(reward_fn, *pair) for pair in pairs]
        else:
            assert self._pool is not None, f"no reward for task {task!r}"
            results = self._pool.grade(task, pairs)
        return [
            self._as_wrong(task, pair, result) if isinstance(result, Ungradable) else result
            for pair, result in zip(pairs, results, strict=True)
        ]

    def wrong_scores(self, task: str, response: str, ground_truth: str) -> Scores | ScoringError:
        """Return what the response earns if no term that may run away judges it right."""
        wrong_fn = self._wrong_fns[task]
        if wrong_fn is None:
            return ScoringError("scorer.ungradable_reward is null")
        scores = try_to_grade(wrong_fn, response, ground_truth)
        return ScoringError(str(scores)) if isinstance(scores, str | Ungradable) else scores

    def _as_wrong(self, task: str, pair: tuple[str, str], cause: Ungradable) -> Ungradable | ScoringError:
        scores = self.wrong_scores(task, *pair)
        return ScoringError(str(cause)) if isinstance(scores, ScoringError) else type(cause)(str(cause), scores)

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()


def _in_process(reward_fn: RewardFn, response: str, ground_truth: str) -> Result:
    result = try_to_grade(reward_fn, response, ground_truth)
    return ScoringError(result) if isinstance(result, str) else result
