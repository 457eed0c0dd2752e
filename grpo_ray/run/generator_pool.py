"""A prompt's way to a scored group, whatever dies on the way.

A Generator that dies, or fails a weight sync, is replaced: its groups are sampled again by those that serve,
and the fresh one gets none before it has been synced. A Scorer that dies is replaced, and scores again.
"""

import asyncio
import contextlib
import hashlib
import time
from dataclasses import replace
from typing import Any

from grpo_ray.actors.weight_sync import WeightSyncError
from grpo_ray.config import Config, SamplingConfig
from grpo_ray.engines.base import EngineDied
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.run.open_calls import Watch
from grpo_ray.run.restarts import RestartBudget
from grpo_ray.telemetry.run_log import RunLog
from grpo_ray.types import PromptItem, SamplingSettings


def training_settings(sampling: SamplingConfig, end_token_ids: tuple[int, ...]) -> SamplingSettings:
    """How a run samples; how many responses, each request says."""
    return SamplingSettings(
        num_samples=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop=sampling.stop,
        end_token_ids=end_token_ids,
    )


class Seat:
    """One incarnation of a Generator; failures of an earlier one do not count against it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.num_running = 0


class Rollouts:
    """The Generators that serve, the Scorer, and what replaces them; `start` before use."""

    def __init__(
        self,
        config: Config,
        settings: SamplingSettings,
        actors: Any,
        watch: Watch,
        budget: RestartBudget,
        log: RunLog,
    ) -> None:
        self._config, self._settings = config, settings
        self._actors, self._watch, self._budget, self._log = actors, watch, budget, log
        self._serving = {name: Seat(client) for name, client in actors.generators.items()}
        self._seats_changed = asyncio.Condition()
        self._scorer_lock = asyncio.Lock()
        self._tasks: asyncio.TaskGroup | None = None
        self.replacing: set[asyncio.Task[None]] = set()
        self.num_retried = 0
        self.num_sampled_tokens = 0  # so far

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Replacements run in this group: one that is out of budget ends the run."""
        self._tasks = tasks

    @property
    def serving(self) -> dict[str, Any]:
        """The Generators that serve, by name."""
        return {name: seat.client for name, seat in self._serving.items()}

    @property
    def seats(self) -> dict[str, Seat]:
        """The Generators that serve now, each with its incarnation, by name."""
        return dict(self._serving)

    @property
    def scorer(self) -> Any:
        return self._actors.scorer

    async def sample(self, item: PromptItem, num_samples: int, purpose: str) -> Any | None:
        """A reference to the item's ScoredGroup; None when it failed too often and is to be set aside.

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

    async def _generate(self, item: PromptItem, settings: SamplingSettings) -> Any:
        """A reference to the sampled group.

        Raises:
            DataLost: its Generator died.
            TimeoutError: it was not finished within `recovery.group_timeout_s`, and was aborted.
        """
        limit_s = self._config.recovery.group_timeout_s
        seat = await self._take_seat()
        name = seat.client.name
        try:
            with self._watch.call(name, f"samples group {item.group_id}"):
                group, sampled = seat.client.generate.split(item, settings)
                async with asyncio.timeout(limit_s):  # wait_for can swallow a cancellation
                    num_tokens = await sampled
            self.num_sampled_tokens += num_tokens
            return group
        except TimeoutError as error:
            raise TimeoutError(f"{name} did not finish it within {limit_s:g} s") from error
        except (ActorDied, EngineDied) as error:
            self.report(name, str(error), seat)
            raise DataLost(str(error)) from error
        finally:
            seat.num_running -= 1

    def _request(self, num_samples: int, request: str) -> SamplingSettings:
        """How to sample; the reference engine gets a seed, so that a resumed run draws the same.

        vLLM would sample seeded requests apart from the others, which is slow, and not the same either.
        """
        seed = None
        if self._config.generator.engine == "torch":
            text = f"{self._config.run.seed}/{request}"
            seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
        return replace(self._settings, num_samples=num_samples, seed=seed)

    async def _take_seat(self) -> Seat:
        """The least busy Generator that serves, which counts as busier from here on."""
        async with self._seats_changed:
            await self._seats_changed.wait_for(lambda: self._serving)
            seat = min(self._serving.values(), key=lambda seat: seat.num_running)
            seat.num_running += 1
            return seat

    async def _score(self, group: Any, item: PromptItem) -> Any:
        while True:
            scorer = self._actors.scorer
            try:
                with self._watch.call("scorer", f"scores group {item.group_id}"):
                    scored, num_errors = scorer.score.split(group)
                    await num_errors
            except ActorDied as error:
                await self.replace_scorer(scorer, str(error))
                continue
            return scored

    async def ask_all(self, method: str) -> None:
        """Every Generator that serves does it; one that cannot is replaced."""

        async def ask(name: str, seat: Seat) -> None:
            try:
                with self._watch.call(name, f"is asked to {method}"):
                    await getattr(seat.client, method)()
            except (ActorDied, EngineDied) as error:
                self.report(name, str(error), seat)

        await asyncio.gather(*(ask(name, seat) for name, seat in self.seats.items()))

    # Replacing

    def report(self, name: str, error: str, seat: Seat | None = None) -> None:
        """This Generator is not to be trusted: replace it, unless that has been begun."""
        assert self._tasks is not None
        current = self._serving.get(name)
        if current is not None and (seat is None or seat is current):
            del self._serving[name]
            task = self._tasks.create_task(self._replace(name, error))
            self.replacing.add(task)
            task.add_done_callback(self.replacing.discard)

    async def _replace(self, name: str, error: str) -> None:
        while True:
            started = time.monotonic()
            pause_s = self._budget.spend(error)
            self._log.event("generator_failed", name, f"{error}; it is replaced in {pause_s:g} s")
            await self._actors.weight_sync.retire(name)
            await asyncio.sleep(pause_s)
            try:
                with self._watch.call(name, "starts"):
                    client = self._actors.restart_generator(name)
                    await client.ready()
                version = await self._actors.weight_sync.admit(client)
                break
            except (ActorDied, EngineDied, WeightSyncError) as again:
                if isinstance(again, ActorDied) and again.name != name:
                    raise
                error = str(again)
        async with self._seats_changed:
            self._serving[name] = Seat(client)
            self._seats_changed.notify_all()
        seconds = time.monotonic() - started
        self._log.event(
            "generator_back", name, f"serves version {version} again after {seconds:.1f} s", seconds=seconds
        )

    async def replace_scorer(self, scorer: Any, error: str) -> None:
        """Replace this Scorer, unless another group has done so already."""
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
