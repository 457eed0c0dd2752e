"""Actors of one kind without state: work goes to the least busy, and one that dies is replaced."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Generic, Literal, TypeVar, cast

from grpo_ray.actors.clients import ActorClient
from grpo_ray.errors import ActorDied
from grpo_ray.run.context import ServingContext
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.run.starting import until_ready

ClientT = TypeVar("ClientT", bound=ActorClient)


class StatelessActors(Generic[ClientT]):
    """All Scorers of a run, or all its EnvironmentWorkers."""

    def __init__(
        self,
        kind: Literal["scorer", "environment"],
        clients: Mapping[str, ClientT],
        context: ServingContext,
        budget: RestartBudget,
    ) -> None:
        """
        Args:
            kind: begins the names of events.
            clients: the current ones; a restart changes the mapping itself.
        """
        self._kind, self._clients = kind, clients
        self._context, self._budget = context, budget
        self._locks = {name: asyncio.Lock() for name in clients}  # held by a replacement
        self._num_groups: Counter[str] = Counter()  # that each has now

    @contextlib.contextmanager
    def least_busy(self) -> Iterator[ClientT]:
        """Give one more group to the least busy actor while the block lasts."""
        name = min(self._locks, key=lambda name: (self._locks[name].locked(), self._num_groups[name]))
        self._num_groups[name] += 1
        try:
            yield self._clients[name]
        finally:
            self._num_groups[name] -= 1

    def is_being_replaced(self, name: str) -> bool:
        return self._locks[name].locked()

    async def replace(self, client: ClientT, error: str) -> None:
        """Replace this actor, unless that has been done already."""
        context, name = self._context, client.name
        async with self._locks[name]:
            while self._clients[name] is client:
                started = time.monotonic()
                pause_s = self._budget.spend(name, error)
                context.log.event(f"{self._kind}_failed", name, f"{error}; it is replaced in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                client = cast(ClientT, context.actors.restart_worker(name))
                try:
                    await until_ready(client, context)
                except (ActorDied, TimeoutError) as again:
                    error = str(again)
                    continue
                seconds = time.monotonic() - started
                text = f"works again after {seconds:.1f} s"
                context.log.event(f"{self._kind}_back", name, text, seconds=seconds)
                return
