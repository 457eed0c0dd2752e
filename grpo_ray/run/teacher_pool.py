"""The Teachers as one: each group goes to the least busy, and those of one that dies are looked up again."""

import numpy as np

from grpo_ray.actors.clients import TeacherClient
from grpo_ray.run.context import ServingContext
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.run.stateless_actors import StatelessActors
from grpo_ray.types import PromptItem, Ref, RolloutGroup


class TeacherPool(StatelessActors[TeacherClient]):
    """All Teachers of a run as one."""

    def __init__(self, context: ServingContext, budget: RestartBudget) -> None:
        super().__init__("teacher", context.actors.teachers, context, budget)
        self.num_tokens = 0  # looked up so far

    async def look_up(self, group: Ref[RolloutGroup], item: PromptItem, is_retry: bool) -> Ref[np.ndarray]:
        """Return a reference to the teacher's logprobs of the group's tokens.

        Raises:
            DataLost: the group is gone.
        """

        async def look_up(teacher: TeacherClient) -> tuple[Ref[np.ndarray], int]:
            logprobs, num_tokens = teacher.look_up(group)
            return logprobs, await num_tokens

        logprobs, num_tokens = await self.ask(f"looks up group {item.group_id}", is_retry, look_up)
        self.num_tokens += num_tokens
        return logprobs
