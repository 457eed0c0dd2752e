"""The Teachers as one: each group goes to the least busy, and those of one that dies are looked up again."""

import numpy as np

from grpo_ray.actors.clients import TeacherClient
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied
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
        while True:
            with self.least_busy() as teacher:
                try:
                    what = f"looks up group {item.group_id}"
                    with self._context.calls.call(teacher.name, what, is_retry=is_retry):
                        logprobs, num_tokens = teacher.look_up(group)
                        num_looked_up = await num_tokens  # other groups may have ended by then
                    self.num_tokens += num_looked_up
                    return logprobs
                except (ActorDied, EngineDied) as error:
                    await self.replace(teacher, str(error))
