"""Rewards: how a response to a question is graded.

    builtin.py         the reward functions that a configuration names, such as `r1_zero`; start here
    configured.py      from `task.reward` (a name, `module:function`, or a weighted sum) to one function
    user_function.py   a function of the user's own, and networked.py, one that asks a server
    trial.py           a try of a reward on one example before a run
    answer_formats.py  where in a response its answer is
    math/              when two answers are equal to a mathematician
    grader.py          the Grader of a run, and isolation/, the processes that grade for it
    base.py            the types that all of these share

docs/rewards.md has each formula.
"""

from grpo_ray.rewards.builtin import REWARDS, question_only_reward_fn, r1_zero_reward_fn
from grpo_ray.rewards.configured import get_reward_fn, needs_isolation, uses_algebra

__all__ = [
    "REWARDS",
    "get_reward_fn",
    "needs_isolation",
    "question_only_reward_fn",
    "r1_zero_reward_fn",
    "uses_algebra",
]
