"""The Scorers, and their replacement while a run continues: each group goes to the least busy of them.

A Scorer that dies is replaced, within the budget of restarts, and its groups are scored again.
"""

import asyncio
import time
from collections import Counter

from grpo_ray.actors.clients import ScorerClient
from grpo_ray.errors import ActorDied
from grpo_ray.run.context import ServingContext
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.run.starting import until_ready
from grpo_ray.types import PromptItem, Ref, RolloutGroup, Verdict


class ScorerPool:
    """All Scorers of a run as one."""

    def __init__(self, context: ServingContext, budget: RestartBudget) -> None:
        self._context, self._budget = context, budget
        self._locks = {name: asyncio.Lock() for name in context.actors.scorers}  # held by a replacement
        self._num_groups: Counter[str] = Counter()  # that each has now

    async def score(self, group: Ref[RolloutGroup], item: PromptItem, is_retry: bool) -> Verdict:
        """Return the group's verdict.

        Raises:
            DataLost: the group is gone.
        """
        while True:
            name = min(self._locks, key=lambda name: (self._locks[name].locked(), self._num_groups[name]))
            scorer = self._context.actors.scorers[name]
            self._num_groups[name] += 1
            try:
                with self._context.calls.call(name, f"scores group {item.group_id}", is_retry=is_retry):
                    return await scorer.score(group)
            except ActorDied as error:
                await self.replace(name, scorer, str(error))
            finally:
                self._num_groups[name] -= 1

    def is_being_replaced(self, name: str) -> bool:
        return self._locks[name].locked()

    async def replace(self, name: str, scorer: ScorerClient, error: str) -> None:
        """Replace this Scorer, unless that has been done already."""
        context = self._context
        async with self._locks[name]:
            while context.actors.scorers[name] is scorer:
                started = time.monotonic()
                pause_s = self._budget.spend(name, error)
                context.log.event("scorer_failed", name, f"{error}; it is replaced in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                scorer = context.actors.restart_scorer(name)
                try:
                    await until_ready(scorer, context)
                except (ActorDied, TimeoutError) as again:
                    error = str(again)
                    continue
                seconds = time.monotonic() - started
                text = f"scores again after {seconds:.1f} s"
                context.log.event("scorer_back", name, text, seconds=seconds)
                return
