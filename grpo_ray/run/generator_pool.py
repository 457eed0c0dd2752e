"""The Generators and the Scorer, and their replacement while a run continues.

A Generator that dies, or fails a weight sync, is replaced: its groups are sampled again by Generators that
serve, and the replacement gets none before its first sync. A Scorer that dies is replaced, and scores again.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from grpo_ray.actors.clients import GeneratorClient, ScorerClient, ServingActors, WeightSyncClient
from grpo_ray.actors.weight_sync import WeightSyncError
from grpo_ray.config import SamplingConfig
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.run.context import ServingContext
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.types import PromptItem, Ref, RolloutGroup, SamplingSettings, ScoredGroup


def training_settings(sampling: SamplingConfig, end_token_ids: tuple[int, ...]) -> SamplingSettings:
    """Return a run's sampling parameters; each request sets its own number of responses."""
    return SamplingSettings(
        num_samples=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        end_token_ids=end_token_ids,
    )


@dataclass(eq=False)
class Incarnation:
    """One process under a Generator's name; the failures of an earlier one do not count against it."""

    client: GeneratorClient
    num_running: int = 0


class GeneratorPool:
    """The Generators that serve and the Scorer: samples and scores groups, and replaces actors that fail."""

    def __init__(
        self,
        context: ServingContext,
        weight_sync: WeightSyncClient,
        settings: SamplingSettings,
        budget: RestartBudget,
    ) -> None:
        self._config, self._calls, self._log = context.config, context.calls, context.log
        self._actors, self._weight_sync = context.actors, weight_sync
        self._settings, self._budget = settings, budget
        self._serving = {name: Incarnation(client) for name, client in context.actors.generators.items()}
        self._serving_changed = asyncio.Condition()
        self._failed_meanwhile: dict[str, str] = {}  # errors of Generators that are being replaced
        self._scorer_lock = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self.replacing: set[asyncio.Task[None]] = set()
        self.num_retried = 0
        self.num_sampled_tokens = 0  # since the pool was made

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run replacements in this task group; a replacement that exceeds the budget ends the run."""
        self._tasks = tasks

    @property
    def actors(self) -> ServingActors:
        return self._actors

    @property
    def serving(self) -> Mapping[str, Incarnation]:
        """The Generators that serve now, by name."""
        return dict(self._serving)

    # Sampling

    async def sample(self, item: PromptItem, num_samples: int, purpose: str) -> Ref[ScoredGroup] | None:
        """Return a reference to the item's scored group, or None if it failed too often.

        Deaths of actors do not count against the group: `recovery.max_restarts` bounds those.
        """
        settings = self._request(num_samples, f"{purpose}/{item.group_id}")
        num_failures = 0
        while True:
            try:
                group = await self._generate(item, settings)
            except DataLost:
                self.num_retried += 1
                continue
            except Exception as error:
                num_failures += 1
                self._log.event("group_failed", None, f"group {item.group_id}: {error} (try {num_failures})")
                if num_failures > self._config.recovery.max_group_retries:
                    return None
                self.num_retried += 1
                continue
            with contextlib.suppress(DataLost):
                return await self._score(group, item)

    def _request(self, num_samples: int, request: str) -> SamplingSettings:
        """Return the parameters of one request, with a seed for the reference engine only.

        The seed makes a resumed run draw the same. vLLM would sample seeded requests separately, which is slow,
        and would not reproduce them either.
        """
        seed = None
        if self._config.generator.engine == "torch":
            text = f"{self._config.run.seed}/{request}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return replace(self._settings, num_samples=num_samples, seed=seed)

    async def _generate(self, item: PromptItem, settings: SamplingSettings) -> Ref[RolloutGroup]:
        """Return a reference to the sampled group.

        Raises:
            DataLost: the group's Generator died.
            TimeoutError: the group was not finished within `recovery.group_timeout_s`, and was aborted.
        """
        limit_s = self._config.recovery.group_timeout_s
        generator = await self._least_busy()
        name = generator.client.name
        try:
            with self._calls.call(name, f"samples group {item.group_id}"):
                group, sampled = generator.client.generate(item, settings)
                async with asyncio.timeout(limit_s):  # wait_for can swallow a cancellation
                    num_tokens = await sampled
            self.num_sampled_tokens += num_tokens
            return group
        except TimeoutError as error:
            raise TimeoutError(f"{name} did not finish it within {limit_s:g} s") from error
        except (ActorDied, EngineDied) as error:
            self.retire(name, str(error), generator)
            raise DataLost(str(error)) from error
        finally:
            generator.num_running -= 1

    async def _least_busy(self) -> Incarnation:
        """Wait until a Generator serves; return the least busy one, with one more group counted."""
        async with self._serving_changed:
            await self._serving_changed.wait_for(lambda: self._serving)
            generator = min(self._serving.values(), key=lambda incarnation: incarnation.num_running)
            generator.num_running += 1
            return generator

    async def _score(self, group: Ref[RolloutGroup], item: PromptItem) -> Ref[ScoredGroup]:
        while True:
            scorer = self._actors.scorer
            try:
                with self._calls.call("scorer", f"scores group {item.group_id}"):
                    scored, num_errors = scorer.score(group)
                    await num_errors
            except ActorDied as error:
                await self.replace_scorer(scorer, str(error))
                continue
            return scored

    async def ask_all(self, what: str, ask: Callable[[GeneratorClient], Awaitable[None]]) -> None:
        """Call every Generator that serves; replace those that cannot answer."""

        async def ask_one(name: str, generator: Incarnation) -> None:
            try:
                with self._calls.call(name, f"is asked to {what}"):
                    await ask(generator.client)
            except (ActorDied, EngineDied) as error:
                self.retire(name, str(error), generator)

        await asyncio.gather(*(ask_one(name, generator) for name, generator in self.serving.items()))

    # Replacing

    def retire(self, name: str, error: str, incarnation: Incarnation | None = None) -> None:
        """Replace a Generator that failed, unless that has begun already.

        Args:
            incarnation: the process that failed; default: the one that serves now.
        """
        assert self._tasks is not None
        current = self._serving.get(name)
        if current is not None and (incarnation is None or incarnation is current):
            del self._serving[name]
            task = self._tasks.create_task(self._replace(name, error))
            self.replacing.add(task)
            task.add_done_callback(self.replacing.discard)
        elif current is None and incarnation is None:
            self._failed_meanwhile[name] = error

    async def _replace(self, name: str, error: str) -> None:
        while True:
            started = time.monotonic()
            pause_s = self._budget.spend(error)
            self._log.event("generator_failed", name, f"{error}; it is replaced in {pause_s:g} s")
            await self._weight_sync.retire(name)
            await asyncio.sleep(pause_s)
            try:
                with self._calls.call(name, "starts"):
                    client = self._actors.restart_generator(name)
                    await client.ready()
                version = await self._weight_sync.admit(client)
            except (ActorDied, EngineDied, WeightSyncError) as again:
                if isinstance(again, ActorDied) and again.name != name:
                    raise
                error = str(again)
                continue
            async with self._serving_changed:
                failure = await self._failure_since_admission(name)
                if failure is None:
                    self._serving[name] = Incarnation(client)
                    self._serving_changed.notify_all()
                    break
                error = failure
        seconds = time.monotonic() - started
        self._log.event(
            "generator_back", name, f"serves version {version} again after {seconds:.1f} s", seconds=seconds
        )

    async def _failure_since_admission(self, name: str) -> str | None:
        """Return the error of a sync that the fresh Generator failed before the answer to `admit` arrived here.

        A failure reported meanwhile may also be the predecessor's; then the fresh one is not stale.
        """
        while (error := self._failed_meanwhile.pop(name, None)) is not None:
            if name in await self._weight_sync.stale():
                return error
        return None

    async def replace_scorer(self, scorer: ScorerClient, error: str) -> None:
        """Replace this Scorer, unless that has been done already."""
        async with self._scorer_lock:
            while self._actors.scorer is scorer:
                started = time.monotonic()
                pause_s = self._budget.spend(error)
                self._log.event("scorer_failed", "scorer", f"{error}; it is replaced in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                scorer = self._actors.restart_scorer()
                with contextlib.suppress(ActorDied):
                    await scorer.ready()
                    seconds = time.monotonic() - started
                    self._log.event(
                        "scorer_back", "scorer", f"scores again after {seconds:.1f} s", seconds=seconds
                    )
                    return
