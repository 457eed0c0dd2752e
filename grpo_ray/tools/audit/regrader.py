"""Grading again what a run has graded, without running code that the run's folder brings."""

from collections.abc import Sequence

from grpo_ray.config import Config
from grpo_ray.config.reward import terms_of
from grpo_ray.config.user_code import is_function_name
from grpo_ray.rewards.grader import Grader
from grpo_ray.tools.trust import code_of

UNTRUSTED = "is code that the run's configuration names; if you trust it, audit with --run-reward-code"


class Regrader:
    """The Grader of a run's rewards, except for those that are Python code named by the run."""

    def __init__(self, configs: Sequence[Config], run_reward_code: bool) -> None:
        """
        Args:
            configs: those that the run has had; all have the same task.
            run_reward_code: import and call the run's own rewards and advantages too.
        """
        config = configs[-1]
        rewards = config.task.rewards
        code = {task: names for task, reward in rewards.items() if (names := code_of(reward))}
        self._skipped = {} if run_reward_code else code
        # A judge may answer otherwise today, and costs money.
        self._judged = {task for task, reward in rewards.items() if any(t.network for t in terms_of(reward))}
        own = [kind for c in configs if is_function_name(kind := c.algorithm.advantage_kind)]
        self._skipped_advantage = own[0] if own and not run_reward_code else None
        graded = {t: r for t, r in rewards.items() if not self.skips(t)}
        self.grader = Grader(graded, config.scorer)
        """Close it at the end."""

    @property
    def skips_advantages(self) -> bool:
        """True if the run's advantage is code that is not run."""
        return self._skipped_advantage is not None

    @property
    def notes(self) -> list[str]:
        """One line per task that is not graded again, and one for advantages that are not computed again."""
        skipped = [self._skipped_advantage] if self._skipped_advantage else []
        notes = [f"advantages are not checked, because {name} {UNTRUSTED}" for name in skipped]
        notes += [
            f"{f'task {task}: ' if task else ''}rewards are not checked, because they come over the network"
            for task in sorted(self._judged - self._skipped.keys())
        ]
        return notes + [
            f"{f'task {task}: ' if task else ''}rewards are not checked, because {', '.join(names)} {UNTRUSTED}"
            for task, names in self._skipped.items()
        ]

    def skips(self, task: str) -> bool:
        """Return True if the task's reward is code that is not run, or asks the network."""
        return task in self._skipped or task in self._judged
