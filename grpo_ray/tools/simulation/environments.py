"""The EnvironmentWorker of a simulation: episodes of turns by chance, which real Generators' turns sample.

The way of the turns is the run's own: TurnRouter, TurnLink, and the Generator's boxes. The episode function,
its threads and chat templates are left out.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from grpo_ray.config import Config
from grpo_ray.episodes.outcome import Outcome, Status, episode_of
from grpo_ray.episodes.segments import Segments
from grpo_ray.episodes.turn_router import RoutedSampler, TurnClient, TurnRouter
from grpo_ray.tools.simulation.speeds import Speeds
from grpo_ray.types import Episode, PlayReport, PromptItem, RolloutGroup, SamplingSettings
from grpo_ray.watch.stage_clock import ClockedActor, StageClock

TOKEN = 0


class SimulatedEnvironmentWorker(ClockedActor):
    """A worker with episodes of about `episode_turns` replies and `environment_s` between two of them."""

    def __init__(self, name: str, config: Config, speeds: Speeds, num_starts: int) -> None:
        """Begin a life; after `num_starts` earlier processes under this name it is another than theirs."""
        self.name, self._speeds, self._settings = name, speeds, config.episodes
        self._router = TurnRouter(name, config.turn_silence_s)
        self._places = asyncio.Semaphore(config.episodes.max_concurrent)
        self._life = random.Random(f"{config.run.seed}/{name}/{num_starts}")
        self._clock = StageClock(("start", "play"), rest="wait_for_groups")
        self.on_death: Callable[[str], object] = lambda reason: None

    async def ready(self) -> bool:
        if self._speeds.environment_life_s is not None:
            life_s = self._life.expovariate(1 / self._speeds.environment_life_s)
            asyncio.get_running_loop().call_later(life_s, lambda: self.on_death("its time had come"))
        return True

    async def serve(self, serving: Mapping[int, TurnClient]) -> None:
        await self._router.serve(serving)

    async def failures(self, num_known: int) -> list[tuple[int, str]]:
        return await self._router.failures(num_known)

    async def play(
        self, item: PromptItem, settings: SamplingSettings, seed: int
    ) -> tuple[RolloutGroup, PlayReport]:
        """Play `settings.num_samples` episodes of the item at the same time; their rewards are 0 or 1."""
        rng = random.Random(f"{seed}/{item.num_cuts}")
        pass_rate, seeds = rng.random(), [rng.random() for _ in range(settings.num_samples)]
        with self._clock.stage("play"):
            begun = (self._play(item, settings, random.Random(seed), pass_rate) for seed in seeds)
            plays = [asyncio.ensure_future(play) for play in begun]
            try:
                episodes = tuple(await asyncio.gather(*plays))
            finally:
                for play in plays:
                    play.cancel()
        return RolloutGroup(item, episodes, self.name), PlayReport(sum(e.num_tokens for e in episodes), 0)

    async def _play(
        self, item: PromptItem, settings: SamplingSettings, rng: random.Random, pass_rate: float
    ) -> Episode:
        segments = Segments()
        async with self._places:
            began = asyncio.get_running_loop().time()
            try:
                status = await self._router.served.within(
                    self._settings.max_seconds, self._take_turns(item.prompt_token_ids, settings, rng, segments)
                )
            except TimeoutError:
                status = Status.TRUNCATED_TIME
            seconds = asyncio.get_running_loop().time() - began
        outcome: Outcome | None = Outcome(float(rng.random() < pass_rate))
        if status is Status.TRUNCATED_TIME:
            outcome = None
        elif status is not Status.FINISHED:
            outcome = Outcome(self._settings.truncated_reward)
        error = "" if outcome is not None else status.value
        return episode_of(segments, lambda token_ids: "", status, outcome, seconds, error)

    async def _take_turns(
        self, tokens: tuple[int, ...], settings: SamplingSettings, rng: random.Random, segments: Segments
    ) -> Status:
        """Sample turns that each continue the tokens so far, which begin as the prompt's."""
        speeds, sampler = self._speeds, RoutedSampler(self._router)
        num_turns = 1 + int(rng.expovariate(1 / max(1e-9, speeds.episode_turns - 0.5)))
        while segments.num_turns < num_turns:
            if segments.num_turns == self._settings.max_turns:
                return Status.TRUNCATED_TURNS
            room = self._settings.max_tokens - len(tokens)
            if room < max(1, settings.min_tokens):
                return Status.TRUNCATED_TOKENS
            limits = replace(settings, num_samples=1, max_tokens=min(room, settings.max_tokens))
            reply = await sampler.sample(tokens, limits)
            segments.add_sample(segments.add_prompt(tokens), reply)
            if segments.num_turns < num_turns:
                await asyncio.sleep(rng.expovariate(1) * speeds.environment_s)
                tokens += (TOKEN,) * (len(reply.token_ids) + speeds.answer_tokens)
        return Status.FINISHED
