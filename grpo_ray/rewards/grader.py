"""The Grader of a run's answers, which the Scorer, the audit and the evaluation share."""

from collections.abc import Mapping, Sequence

from grpo_ray.config import ScorerConfig
from grpo_ray.config.reward import Reward
from grpo_ray.rewards.base import Scores
from grpo_ray.rewards.configured import get_reward_fn, needs_isolation
from grpo_ray.rewards.isolation.pool import RewardPool, ScoringError
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
        self._pool = None
        if isolated:
            self._pool = RewardPool(isolated, config.num_workers, config.timeout_s, config.memory_gib)

    def start(self) -> None:
        """Wait until answers can be graded.

        Raises:
            RunError: workers cannot be started; the message says why.
        """
        if self._pool is not None:
            self._pool.start()

    def grade(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[Scores | ScoringError]:
        """Return, in order, the scores of each (response, ground truth), or the reason why it has none.

        Raises:
            RunError: workers cannot be started.
        """
        reward_fn = self._reward_fns.get(task)
        if reward_fn is None:
            assert self._pool is not None, f"no reward for task {task!r}"
            return self._pool.grade(task, pairs)
        results = [try_to_grade(reward_fn, *pair) for pair in pairs]
        return [ScoringError(result) if isinstance(result, str) else result for result in results]

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()
