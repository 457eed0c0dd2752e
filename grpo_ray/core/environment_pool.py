"""The EnvironmentWorkers as one: each knows the Generators that serve, and reports those that fail a turn.

A worker that dies is replaced, within the budget of restarts, and its groups are played again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from grpo_ray.core.clients import EnvironmentClient, GeneratorClient
from grpo_ray.core.context import ServingContext
from grpo_ray.core.dispatch import Incarnation
from grpo_ray.core.stateless_actors import StatelessActors
from grpo_ray.episodes.environment_worker import environment_seed
from grpo_ray.episodes.turn_router import ServingTime
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.types import PromptItem, Ref, RolloutGroup, SamplingSettings
from grpo_ray.watch.event_loop import Changes
from grpo_ray.watch.restarts import Gate, RestartBudget

GRACE_S = 60.0  # for the end of a group after its episodes have ended or were given up
PING_S = 5.0  # between two calls that show that a worker answers
ANSWER_S = 60.0  # for such a call; less in runs that are stalled sooner
MAX_STUCK = 16  # threads that a worker's episodes may leave behind


class EnvironmentPool(StatelessActors[EnvironmentClient]):
    """All EnvironmentWorkers of a run as one."""

    def __init__(
        self, context: ServingContext, budget: RestartBudget, on_failure: Callable[[int, str], None]
    ) -> None:
        """`on_failure`: takes the number of the Generator's process that failed a turn, and the error."""
        super().__init__("environment", context.actors.environments, context, budget)
        self._on_failure = on_failure
        self._gates = {name: Gate() for name in self._clients}
        self._answer_s = min(ANSWER_S, context.config.recovery.stall_timeout_s / 2)
        self._serving: Mapping[int, GeneratorClient] = {}
        self._served = ServingTime()
        self._changes = Changes()  # of the Generators that serve

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Keep the workers informed, and replace those that die, in this task group."""
        super().start(tasks)
        for name in self._clients:
            tasks.create_task(self._keep(name))

    def serve(self, serving: Mapping[str, Incarnation]) -> None:
        """Send turns to these Generators from now on."""
        self._serving = {generator.client.number: generator.client for generator in serving.values()}
        self._served.set(bool(self._serving))
        self._changes.announce()

    @contextlib.asynccontextmanager
    async def room(self, is_alone: bool) -> AsyncIterator[EnvironmentClient]:
        """Wait until the least busy worker has no group that is alone, or none at all; hold the place in it."""
        with self.least_busy() as chosen:
            async with self._gates[chosen.name].enter(is_alone):
                if (replacement := self.replacing.get(chosen.name)) is not None:
                    await asyncio.shield(replacement)
                yield self._clients[chosen.name]

    def _is_free(self, name: str) -> bool:
        return super()._is_free(name) and not self._gates[name].is_closed

    async def play(
        self, worker: EnvironmentClient, item: PromptItem, settings: SamplingSettings, purpose: str
    ) -> tuple[Ref[RolloutGroup], int]:
        """Return a reference to the group of episodes, played in a `room`, and its number of sampled tokens.

        Raises:
            DataLost: the worker died.
            TurnLost: Generators died of a turn.
            TimeoutError: the episodes did not end in time.
        """
        seed = environment_seed(self._context.config.run.seed, purpose, item.group_id)
        limit_s = self._limit_s(worker.name)
        try:
            with self._context.calls.call(worker.name, f"plays group {item.group_id}", is_waiting=True):
                group, report = worker.play(item, settings, seed)
                played = await self._served.within(limit_s, report)
        except ActorDied as error:
            self.fail(worker, str(error))
            raise DataLost(str(error)) from error
        except TimeoutError as error:
            text = f"{worker.name} did not end the episodes within {limit_s:g} s"
            self.fail(worker, text)
            raise TimeoutError(text) from error
        if played.num_stuck > MAX_STUCK:
            self.fail(worker, f"{played.num_stuck} threads hang in calls of the environment")
        return group, played.num_tokens

    def _limit_s(self, name: str) -> float:
        """Return the seconds for a worker's newest group; its episodes wait for those of earlier ones."""
        config = self._context.config
        num_rounds = config.episodes.num_rounds(self._num_groups[name] * config.largest_group)
        return num_rounds * (config.episodes.max_seconds + GRACE_S)

    async def _keep(self, name: str) -> None:
        while True:
            worker = self._clients[name]
            watching = asyncio.ensure_future(self._watch(worker))
            limit_s = self._context.config.recovery.start_timeout_s  # its first answer waits for its start
            try:
                while not watching.done():
                    changed = asyncio.ensure_future(self._changes.next())
                    async with asyncio.timeout(limit_s):
                        await worker.serve(self._serving)
                    limit_s = self._answer_s
                    await asyncio.wait({watching, changed}, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                await watching
            except (ActorDied, TimeoutError) as error:
                if isinstance(error, ActorDied) or name not in self.replacing:  # or else it starts
                    self.fail(worker, str(error) or f"it has not answered for {limit_s:g} s")
                if (replacement := self.replacing.get(name)) is not None:
                    await asyncio.wait({replacement})
            finally:
                watching.cancel()

    async def _watch(self, worker: EnvironmentClient) -> None:
        num_known = 0
        while True:
            failures = await worker.failures(num_known)
            num_known += len(failures)
            for number, error in failures:
                self._on_failure(number, error)
