"""The Scorers as one: each group goes to the least busy, and the groups of one that dies are scored again."""

from grpo_ray.actors.clients import ScorerClient
from grpo_ray.run.context import ServingContext
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.run.stateless_actors import StatelessActors
from grpo_ray.types import PromptItem, Ref, RolloutGroup, Verdict


class ScorerPool(StatelessActors[ScorerClient]):
    """All Scorers of a run as one."""

    def __init__(self, context: ServingContext, budget: RestartBudget) -> None:
        super().__init__("scorer", context.actors.scorers, context, budget)

    async def score(self, group: Ref[RolloutGroup], item: PromptItem, is_retry: bool) -> Verdict:
        """Return the group's verdict.

        Raises:
            DataLost: the group is gone.
        """
        return await self.ask(f"scores group {item.group_id}", is_retry, lambda scorer: scorer.score(group))
