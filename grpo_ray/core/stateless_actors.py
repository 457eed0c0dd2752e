"""Actors of one kind without state: work goes to the least busy, and one that dies is replaced."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Generic, Literal, TypeVar

from grpo_ray.core.clients import ActorClient
from grpo_ray.core.context import ServingContext
from grpo_ray.core.starting import until_ready
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, RunError
from grpo_ray.watch.clock import monotonic
from grpo_ray.watch.restarts import RestartBudget

ClientT = TypeVar("ClientT", bound=ActorClient)
T = TypeVar("T")


class StatelessActors(Generic[ClientT]):
    """All Scorers of a run, or all its Teachers, or all its EnvironmentWorkers."""

    def __init__(
        self, kind: Literal["scorer", "teacher", "environment"], clients: Mapping[str, ClientT],
        context: ServingContext, budget: RestartBudget,
    ) -> None:  # fmt: skip
        """
        Args:
            kind: begins the names of events.
            clients: the current ones; a restart changes the mapping itself.
        """
        self._kind, self._clients = kind, clients
        self._context, self._budget = context, budget
        self.replacing: dict[str, asyncio.Task[None]] = {}  # replacements under way, by name
        self._num_groups: Counter[str] = Counter()  # that each has now

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run replacements in this task group; one that exceeds the budget ends the run."""
        self._tasks = tasks

    @contextlib.contextmanager
    def least_busy(self) -> Iterator[ClientT]:
        """Give one more group to the least busy actor while the block lasts."""
        name = min(self._clients, key=lambda name: (not self._is_free(name), self._num_groups[name]))
        self._num_groups[name] += 1
        try:
            yield self._clients[name]
        finally:
            self._num_groups[name] -= 1

    def _is_free(self, name: str) -> bool:
        """Return whether an actor would begin with another group at once."""
        return name not in self.replacing

    async def ask(self, what: str, is_retry: bool, call: Callable[[ClientT], Awaitable[T]]) -> T:
        """Return the answer of the least busy actor; if it dies, it is replaced, and another one is asked."""
        while True:
            while len(self.replacing) == len(self._clients):
                await asyncio.wait(self.replacing.values(), return_when=asyncio.FIRST_COMPLETED)
            with self.least_busy() as actor:
                try:
                    with self._context.calls.call(actor.name, what, is_retry=is_retry):
                        return await call(actor)
                except (ActorDied, EngineDied) as error:
                    self.fail(actor, str(error))

    def fail(self, client: ClientT, error: str) -> None:
        """Begin to replace this actor, unless that has begun, or been done, already."""
        if self._clients[client.name] is client:
            self.retire(client.name, error)

    def retire(self, name: str, error: str) -> None:
        """Begin to replace an actor, unless that has begun already."""
        if name not in self.replacing:
            self.replacing[name] = self._tasks.create_task(self._replace(name, error))
            self.replacing[name].add_done_callback(lambda _: self.replacing.pop(name))

    async def _replace(self, name: str, error: str) -> None:
        context, started = self._context, monotonic()
        while True:
            pause_s = self._budget.spend(name, error)
            context.log.event(f"{self._kind}_failed", name, f"{error}; it is replaced in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            try:
                await until_ready(context.actors.restart(name), context)
                break
            except (ActorDied, EngineDied, RunError, TimeoutError) as again:
                error = str(again)
        seconds = monotonic() - started
        context.log.event(f"{self._kind}_back", name, f"works again after {seconds:.1f} s", seconds=seconds)
