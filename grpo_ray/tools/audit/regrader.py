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
        if run_reward_code:
            code = {}
        # A judge may answer otherwise today, and costs money.
        judged = {task for task, reward in rewards.items() if any(t.network for t in terms_of(reward))}
        own = [kind for c in configs if is_function_name(kind := c.algorithm.advantage_kind)]
        self._skipped = judged | code.keys()
        self.skips_advantages = bool(own) and not run_reward_code
        """True if the run's advantage is code that is not run."""
        skipped = own[:1] if self.skips_advantages else []
        self.notes = [f"advantages are not checked, because {name} {UNTRUSTED}" for name in skipped]
        """One line for advantages that are not computed again, and one per task that is not graded again."""
        whys = dict.fromkeys(sorted(judged - code.keys()), "they come over the network")
        whys |= {task: f"{', '.join(names)} {UNTRUSTED}" for task, names in code.items()}
        for task, why in whys.items():
            self.notes.append(f"{f'task {task}: ' if task else ''}rewards are not checked, because {why}")
        self.grader = Grader({t: r for t, r in rewards.items() if not self.skips(t)}, config.scorer)
        """Close it at the end."""

    def skips(self, task: str) -> bool:
        """Return True if the task's reward is code that is not run, or asks the network."""
        return task in self._skipped
