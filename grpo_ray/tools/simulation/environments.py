"""The EnvironmentWorker of a simulation: episodes of turns by chance, which real Generators' turns sample.

The way of the turns is the run's own: TurnRouter, TurnLink, and the Generator's boxes. The episode function,
its threads and chat templates are left out.
"""

import asyncio
import random
from collections.abc import Callable, Mapping

import numpy as np

from grpo_ray.config import Config
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.turn_router import RoutedSampler, TurnClient, TurnRouter
from grpo_ray.tools.simulation.speeds import Speeds
from grpo_ray.types import (
    CONTEXT,
    Episode,
    EpisodeSequence,
    PlayReport,
    PromptItem,
    RolloutGroup,
    SamplingSettings,
)
from grpo_ray.watch.stage_clock import ClockedActor, StageClock

TOKEN = 0


class _Tokens:
    """The tokens of an episode behind its prompt: sampled ones, and the environment's answers."""

    def __init__(self) -> None:
        self.num_turns = 0
        self._versions = [np.empty(0, np.int32)]
        self._turns = [np.empty(0, np.int32)]

    def __len__(self) -> int:
        return sum(map(len, self._versions))

    def add(self, versions: np.ndarray, turn: int) -> None:
        self._versions.append(versions)
        self._turns.append(np.full(len(versions), turn, np.int32))

    def episode(self, prompt: tuple[int, ...], status: Status, reward: float | None, seconds: float) -> Episode:
        """Return the episode, of one sequence; a reward of None leaves it out of its group's baseline."""
        versions, turns = np.concatenate(self._versions), np.concatenate(self._turns)
        shape = versions.shape
        tokens, logprobs = np.broadcast_to(np.int32(TOKEN), shape), np.broadcast_to(np.float32(-1), shape)
        sequences = (EpisodeSequence(prompt, 0, len(versions)),) if len(versions) else ()
        reason = "length" if status is not Status.FINISHED else "stop"
        return Episode(
            "", tokens, logprobs, versions, reason, turns, sequences, status, reward, seconds,
            error="" if reward is not None else status,
        )  # fmt: skip


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
        tokens, prompt = _Tokens(), item.prompt_token_ids
        async with self._places:
            began = asyncio.get_running_loop().time()
            try:
                status = await self._router.served.within(
                    self._settings.max_seconds, self._take_turns(prompt, settings, rng, tokens)
                )
            except TimeoutError:
                status = Status.TRUNCATED_TIME
            seconds = asyncio.get_running_loop().time() - began
        reward: float | None = float(rng.random() < pass_rate)
        if status is Status.TRUNCATED_TIME:
            reward = None
        elif status is not Status.FINISHED:
            reward = self._settings.truncated_reward
        return tokens.episode(prompt, status, reward, seconds)

    async def _take_turns(
        self, prompt: tuple[int, ...], settings: SamplingSettings, rng: random.Random, tokens: _Tokens
    ) -> Status:
        speeds, sampler = self._speeds, RoutedSampler(self._router)
        num_turns = 1 + int(rng.expovariate(1 / max(1e-9, speeds.episode_turns - 0.5)))
        while tokens.num_turns < num_turns:
            if tokens.num_turns == self._settings.max_turns:
                return Status.TRUNCATED_TURNS
            room = self._settings.max_tokens - len(prompt) - len(tokens)
            if room < max(1, settings.min_tokens):
                return Status.TRUNCATED_TOKENS
            limits = SamplingSettings(
                **{**vars(settings), "num_samples": 1, "max_tokens": min(room, settings.max_tokens)}
            )
            reply = await sampler.sample(prompt + (TOKEN,) * len(tokens), limits)
            tokens.add(reply.versions, tokens.num_turns)
            tokens.num_turns += 1
            if tokens.num_turns < num_turns:
                await asyncio.sleep(rng.expovariate(1) * speeds.environment_s)
                tokens.add(np.full(speeds.answer_tokens, CONTEXT, np.int32), CONTEXT)
        return Status.FINISHED
