"""All that samples and grades as one, and the replacement of Generators while a run continues.

A Generator that dies, or fails a weight sync, is replaced: its groups are sampled again by Generators that
serve, and the replacement gets none before its first sync. stateless_actors.py replaces the other actors.
Nothing here waits without a limit: an actor that does not start in time is killed and started again, within
the budget of restarts, and a group that fails or is lost too often is given up.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from grpo_ray.config import SamplingConfig
from grpo_ray.core.clients import GeneratorClient, TeacherClient, WeightSyncClient
from grpo_ray.core.context import ServingContext
from grpo_ray.core.dispatch import Dispatcher, Incarnation
from grpo_ray.core.environment_pool import EnvironmentPool
from grpo_ray.core.starting import until_ready
from grpo_ray.core.stateless_actors import StatelessActors
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, DataLost, first_error
from grpo_ray.types import PromptItem, Ref, RolloutGroup, SamplingSettings, ScoredGroup, Verdict
from grpo_ray.watch.clock import monotonic
from grpo_ray.watch.event_loop import FanOut
from grpo_ray.watch.restarts import BudgetUsedUp, Gate, Losses, RestartBudget, Suspects, pause_s

Scored = tuple[Ref[RolloutGroup], Verdict, Ref[np.ndarray] | None]


def training_settings(sampling: SamplingConfig, end_token_ids: tuple[int, ...]) -> SamplingSettings:
    """Return a run's sampling parameters; each request sets its own number of responses."""
    values = sampling.model_dump(include={"temperature", "top_p", "min_tokens", "max_tokens", "stop"})
    return SamplingSettings(num_samples=1, end_token_ids=end_token_ids, **values)


class GeneratorPool:
    """The actors that serve: samples or plays groups, and scores them, and replaces the actors that fail."""

    def __init__(
        self, context: ServingContext, weight_sync: WeightSyncClient, settings: SamplingSettings,
        budget: RestartBudget,
    ) -> None:  # fmt: skip
        self._context = context
        self._config, self._calls, self._log = context.config, context.calls, context.log
        self.actors, self._weight_sync = context.actors, weight_sync
        self._settings, self._budget = settings, budget
        self._dispatcher = Dispatcher(context.actors.generators.values(), context.config.generator.max_num_seqs)
        self._admitted: dict[int, str | None] = {}  # by process that does not serve yet: its error in a sync
        self._scorers = StatelessActors("scorer", context.actors.scorers, context, budget)
        self._teachers = StatelessActors("teacher", context.actors.teachers, context, budget)
        self._environments = EnvironmentPool(context, budget, self.fail)
        self._others: tuple[StatelessActors[Any], ...] = self._scorers, self._teachers, self._environments
        self._environments.serve(self._dispatcher.serving)
        self._starts, self._fan_out = asyncio.Semaphore(context.config.generator.max_starting), FanOut()
        self._suspects, self._gate = Suspects(), Gate()
        self._device_is_ours = asyncio.Event()  # cleared while a colocated Learner has the device
        self._device_is_ours.set()
        self._tasks: asyncio.TaskGroup | None = None
        self._replacing: dict[asyncio.Task[None], str] = {}  # the actor's name
        self.num_retried = 0
        self.num_sampled_tokens = self.num_looked_up_tokens = 0  # since the pool was made; by Teachers

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run replacements in this task group; a replacement that exceeds the budget ends the run."""
        self._tasks = tasks
        for actors in self._others:
            actors.start(tasks)

    @property
    def serving(self) -> Mapping[str, Incarnation]:
        """The Generators that serve now, by name."""
        return dict(self._dispatcher.serving)

    @property
    def being_replaced(self) -> frozenset[str]:
        return frozenset(self._replacing.values()).union(*(actors.replacing for actors in self._others))

    # Sampling

    async def sample_whole(self, item: PromptItem, num_samples: int, purpose: str) -> ScoredGroup | None:
        """Sample as `sample`, and fetch the group; again if the node that held it has died."""
        while (scored := await self.sample(item, num_samples, purpose)) is not None:
            group, verdict, _ = scored
            with contextlib.suppress(DataLost):
                return ScoredGroup.of(await self.actors.fetch(group), verdict)
        return None

    async def sample(
        self, item: PromptItem, num_samples: int, purpose: str, on_dispatch: Callable[[], None] = lambda: None
    ) -> Scored | None:
        """Return references to the item's group and, in training, to a teacher's logprobs, with the verdict.

        The result is None if the group failed or was lost too often. `on_dispatch` is called whenever a
        Generator is given the group.
        """
        recovery = self._config.recovery
        name = f"{purpose}/{item.group_id}"
        settings = self._request(num_samples, name)
        num_failures, losses = 0, self._suspects.losses(name)
        while True:
            is_retry = num_failures + losses.num > 0
            try:
                async with contextlib.AsyncExitStack() as rooms:
                    group, num_tokens = await self._play(
                        item, settings, purpose, on_dispatch, is_retry, losses, rooms
                    )
                    self.num_sampled_tokens += num_tokens
                    # A suspect keeps its process to itself until the Scorer has fetched the group from there.
                    if not losses.is_suspect:
                        await rooms.aclose()
                    scored = await self._judge(group, item, is_retry, purpose)
                self._suspects.ended(name, is_finished=True)
                return scored
            except BudgetUsedUp:
                raise
            except DataLost as error:  # one event tells of the actor's death, whatever was lost with it
                losses = self._suspects.lost(name, error)
                if losses.is_suspect:
                    text = f"group {item.group_id}: {error} (alone {losses.num_alone} times)"
                    self._log.event("group_lost", None, text)
            except Exception as error:
                num_failures += 1
                cause = "; ".join([repr(error), *getattr(error, "__notes__", ())])
                self._log.event("group_failed", None, f"group {item.group_id}: {cause} (try {num_failures})")
            if num_failures > recovery.max_group_retries or losses.num_alone > recovery.max_group_losses:
                self._suspects.ended(name, is_finished=False)
                return None
            self.num_retried += 1
            num_pauses = max(num_failures, losses.num + losses.num_alone - 1)  # none after the first death
            if num_pauses:
                await asyncio.sleep(pause_s(recovery.restart_backoff_s, num_pauses - 1))

    async def _play(
        self, item: PromptItem, settings: SamplingSettings, purpose: str, on_dispatch: Callable[[], None],
        is_retry: bool, losses: Losses, rooms: contextlib.AsyncExitStack,
    ) -> tuple[Ref[RolloutGroup], int]:  # fmt: skip
        """Have the group sampled in a process with room for it; a suspect is alone there.

        Turns of all episodes share the Generators. So where there are episodes, a suspect that may end a
        Generator is alone in the whole pool. `rooms` takes the places that the group holds.
        """
        is_alone, has_turns = losses.is_suspect, item.task in self._config.episode_tasks
        is_in_generator = losses.is_in_turn if has_turns else bool(self._config.episode_tasks)
        await rooms.enter_async_context(self._gate.enter(is_alone and is_in_generator))
        if has_turns:
            worker = await rooms.enter_async_context(self._environments.room(is_alone))
            on_dispatch()
            return await self._environments.play(worker, item, settings, purpose)
        generator = await rooms.enter_async_context(self._dispatcher.room(settings.num_samples, is_alone))
        return await self._generate(generator, item, settings, is_retry, on_dispatch)

    async def _judge(self, group: Ref[RolloutGroup], item: PromptItem, is_retry: bool, purpose: str) -> Scored:
        """Have the group scored and, in training, looked up by a Teacher at the same time."""
        scoring = self._scorers.ask(f"scores group {item.group_id}", is_retry, lambda each: each.score(group))
        if purpose != "train" or not self.actors.teachers:
            return group, await scoring, None
        try:
            async with asyncio.TaskGroup() as tasks:
                verdict = tasks.create_task(scoring)
                logprobs = tasks.create_task(self._look_up(group, item, is_retry))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return group, verdict.result(), logprobs.result()

    async def _look_up(self, group: Ref[RolloutGroup], item: PromptItem, is_retry: bool) -> Ref[np.ndarray]:
        """Return a reference to a teacher's logprobs of the group's tokens."""

        async def look_up(teacher: TeacherClient) -> tuple[Ref[np.ndarray], int]:
            logprobs, num_tokens = teacher.look_up(group)
            return logprobs, await num_tokens

        logprobs, num_tokens = await self._teachers.ask(f"looks up group {item.group_id}", is_retry, look_up)
        self.num_looked_up_tokens += num_tokens
        return logprobs

    def _request(self, num_samples: int, request: str) -> SamplingSettings:
        """Return the parameters of one request, with a seed for every engine but vLLM.

        The seed makes a resumed run draw the same. vLLM would sample seeded requests separately, which is slow,
        and would not reproduce them either.
        """
        seed = None
        if self._config.generator.engine != "vllm":
            text = f"{self._config.run.seed}/{request}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return replace(self._settings, num_samples=num_samples, seed=seed)

    async def _generate(
        self, generator: Incarnation, item: PromptItem, settings: SamplingSettings, is_retry: bool,
        on_dispatch: Callable[[], None],
    ) -> tuple[Ref[RolloutGroup], int]:  # fmt: skip
        """Return a reference to the sampled group, and its number of tokens.

        Raises:
            DataLost: the group's Generator died.
            TimeoutError: the group was not finished within `recovery.group_timeout_s`, and was aborted.
        """
        limit_s, name = self._config.recovery.group_timeout_s, generator.client.name
        try:
            async with self._dispatcher.slot(generator, settings.num_samples, limit_s):
                await self._fan_out.turn()  # admission of a version wakes a whole batch at once
                on_dispatch()
                with self._calls.call(name, f"samples group {item.group_id}", is_retry=is_retry):
                    try:
                        group, sampled = generator.client.generate(item, settings)
                        return group, await sampled
                    except (ActorDied, EngineDied) as error:
                        self.fail(generator.client.number, str(error))
                        raise DataLost(str(error)) from error
        except TimeoutError as error:
            raise TimeoutError(f"{name} did not finish it within {limit_s:g} s") from error

    async def ask_all(self, what: str, ask: Callable[[GeneratorClient], Awaitable[None]]) -> None:
        """Call every Generator that serves; replace those that cannot answer."""

        async def ask_one(name: str, generator: Incarnation) -> None:
            try:
                with self._calls.call(name, f"is asked to {what}"):
                    await ask(generator.client)
            except Exception as error:  # also an engine's own, such as vLLM's EngineDeadError
                if isinstance(error, ActorDied) and error.name != name:
                    raise
                self.fail(generator.client.number, str(error) or type(error).__name__)

        await asyncio.gather(*(ask_one(name, generator) for name, generator in self.serving.items()))

    async def sleep(self) -> None:
        """Leave the device to the colocated Learner: no Generator runs or starts on it until `wake`."""
        while self._replacing:
            await asyncio.wait(self._replacing)
        self._device_is_ours.clear()
        await self.ask_all("sleep", lambda generator: generator.sleep())

    async def wake(self) -> None:
        """Take the device back from the colocated Learner."""
        self._device_is_ours.set()
        await self.ask_all("wake", lambda generator: generator.wake())

    # Replacing

    def fail(self, number: int, error: str) -> None:
        """Replace the Generator's process of this number, unless that has begun already."""
        serving = self._dispatcher.serving.items()
        if name := next((name for name, each in serving if each.client.number == number), None):
            self.retire(name, error)
        elif number in self._admitted:
            self._admitted[number] = error

    def retire(self, name: str, error: str) -> None:
        """Replace the actor that serves under this name now, unless that has begun already."""
        if name in self.actors.scorers:
            self._scorers.retire(name, error)
        elif name in self.actors.teachers:
            self._teachers.retire(name, error)
        elif (generator := self._dispatcher.serving.get(name)) is not None:
            self._dispatcher.remove(name)
            self._environments.serve(self._dispatcher.serving)
            assert self._tasks is not None
            task = self._tasks.create_task(self._replace(generator.client, error))
            self._replacing[task] = name
            task.add_done_callback(self._replacing.pop)

    async def _replace(self, client: GeneratorClient, error: str) -> None:
        name, failure = client.name, error
        while True:
            started = monotonic()
            pause_s = self._budget.spend(name, failure)
            self._log.event("generator_failed", name, f"{failure}; it is replaced in {pause_s:g} s")
            with self._calls.call("weight_sync", f"excludes {name}", is_retry=True):
                await self._weight_sync.retire(client.number)
            await asyncio.sleep(pause_s)
            await self._device_is_ours.wait()
            try:
                async with self._starts:
                    client = self.actors.restart(name)
                    await until_ready(client, self._context)
                self._admitted[client.number] = None
                with self._calls.call("weight_sync", f"admits {name}", is_retry=True):
                    version = await self._weight_sync.admit(client)
            except Exception as again:  # whatever an engine raises as it starts
                if isinstance(again, DataLost) or (isinstance(again, ActorDied) and again.name != name):
                    raise
                failure = str(again) or type(again).__name__
                self._admitted.pop(client.number, None)
                continue
            # A sync that followed at once may have failed it before the answer to `admit` arrived here.
            if (failed := self._admitted.pop(client.number)) is None:
                break
            failure = failed
        self._dispatcher.add(client)
        self._environments.serve(self._dispatcher.serving)
        seconds = monotonic() - started
        self._log.event(
            "generator_back", name, f"serves version {version} again after {seconds:.1f} s", seconds=seconds
        )
