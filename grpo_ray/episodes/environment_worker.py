"""EnvironmentWorker: a process in which groups of episodes run, each group in a thread of its own."""

import asyncio
import logging
import os
import shutil
import zlib
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from grpo_ray.config import Config
from grpo_ray.config.secrets import keep_only
from grpo_ray.engines import sample_seed
from grpo_ray.episodes.chat_template import token_bounds
from grpo_ray.episodes.confinement import SCRATCH, confine, make_scratch
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.renderer_template import make_template
from grpo_ray.episodes.runner import EpisodeRunner, load_episode
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.threads import EpisodeThread
from grpo_ray.episodes.turn_router import RoutedSampler, TurnClient, TurnRouter
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records.run_lock import remove_abandoned
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Episode, PlayReport, PromptItem, RolloutGroup, SamplingSettings, StartingModel
from grpo_ray.watch.stage_clock import ClockedActor, StageClock


class EnvironmentWorker(ClockedActor):
    """Episodes as an actor; it plays every group on arrival, and asks the Generators that `serve` names."""

    _has_children = False  # confined, it could not look for them

    def __init__(
        self, name: str, config: Config, model: StartingModel, is_confined: bool = False,
        secrets: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            is_confined: confine the thread that calls `ready`, and so those of the episodes.
            secrets: all credentials that this process is to have from now on; None: those that it has.
        """
        self.name, self._settings, self._is_confined = name, config.episodes, is_confined
        self._unconfined = ThreadPoolExecutor(1)  # makes and removes the temporary folder
        self._scratch: str | None = None
        self._tokenizer = load_tokenizer(model.path, config.model.trust_remote_code)  # with a hub's token
        if secrets is not None:
            keep_only(secrets)
        self._template, self._parser = make_template(self._settings, self._tokenizer, model.end_token_ids)
        token_bounds(self._tokenizer)  # now: it looks at all of the vocabulary once
        length = min(self._settings.max_tokens, model.max_model_len)
        self._limits = self._settings.model_copy(update={"max_tokens": length})
        self._router = TurnRouter(name, config.turn_silence_s)
        self._server = ChatServer()
        episodes = {task: load_episode(part.episode) for task, part in config.episode_tasks.items()}
        self._runners = {
            task: EpisodeRunner(episode, self._limits.max_concurrent, self._server, self._router.served)
            for task, episode in episodes.items()
        }
        self._stopped: list[EpisodeThread] = []  # which run on, as a call in them has not come back
        self._clock = StageClock(("start", "play"), rest="wait_for_groups")

    async def ready(self) -> bool:
        """Start the endpoint that agents reach by `session.base_url`, then confine what follows."""
        with self._clock.stage("start"):
            await self._server.start()
            if self._is_confined:
                self._scratch = self._unconfined.submit(make_scratch).result()
                confine(self._settings, self._scratch)
        return True

    async def shutdown(self) -> None:
        """Remove the temporary folder of the environments, and those that killed workers have left."""
        if self._scratch is not None:
            self._unconfined.submit(shutil.rmtree, self._scratch, ignore_errors=True)
            self._unconfined.submit(remove_abandoned, SCRATCH, os.path.dirname(self._scratch)).result()

    async def serve(self, serving: Mapping[int, TurnClient]) -> None:
        """Send turns to these Generators from now on; each has a number of its own."""
        await self._router.serve(serving)

    async def failures(self, num_known: int) -> list[tuple[int, str]]:
        """Wait until more than `num_known` Generators have failed; return the others' numbers and errors."""
        return await self._router.failures(num_known)

    async def play(
        self, item: PromptItem, settings: SamplingSettings, seed: int
    ) -> tuple[RolloutGroup, PlayReport]:
        """Play `settings.num_samples` episodes of the item at the same time.

        Cancelling the call cancels them.

        Args:
            seed: of the environments, the same for the whole group.

        Raises:
            DataLost: Generators died of a turn (TurnLost), or one with a turn does not answer.
            RuntimeError: a turn could not be sampled; the message says why.
        """
        example = Example(item.prompt, item.ground_truth, task=item.task, seed=seed, facts=item.about)
        thread = EpisodeThread(f"group {item.group_id}")
        label = f"group {item.group_id}, {settings.num_samples} episodes"
        samplers = [RoutedSampler(self._router) for _ in range(settings.num_samples)]

        def play(sample: int, sampler: RoutedSampler) -> Awaitable[Episode]:
            seed = None if settings.seed is None else sample_seed(settings.seed, sample)
            own = replace(settings, num_samples=1, seed=seed)
            session = Session(sampler.sample, own, self._template, self._limits, self._parser)
            return self._runners[item.task].run(session, example, thread)

        try:
            with self._clock.stage("play"), self._clock.span("episodes", label):
                plays = (play(n, sampler) for n, sampler in enumerate(samplers))
                episodes = tuple(await asyncio.gather(*plays))
        finally:
            thread.stop()
            self._stopped = [each for each in (*self._stopped, thread) if each.is_alive]
        late = [n for n, episode in enumerate(episodes) if episode.status == Status.TRUNCATED_TIME]
        await asyncio.gather(*(samplers[n].ran_out_of_time() for n in late))
        if lost := [each.lost for each in samplers if each.lost is not None]:
            raise lost[0]
        for sample, episode in enumerate(episodes):
            if episode.status == Status.GENERATOR_ERROR:
                raise RuntimeError(f"sample {sample} of group {item.group_id}: {episode.error}")
            if episode.status == Status.ENVIRONMENT_ERROR:
                logging.warning("group %d: sample %d: %s", item.group_id, sample, episode.error)
        num_tokens = sum(episode.num_tokens for episode in episodes)
        num_stuck = sum(each.is_stuck for each in self._stopped)
        return RolloutGroup(item, episodes, self.name), PlayReport(num_tokens, num_stuck)


def environment_seed(run_seed: int, purpose: str, group_id: int) -> int:
    """Return the seed of a group's environments, below 2**31: the same for each try and each validation."""
    kind = zlib.crc32(purpose.split()[0].encode())
    state = np.random.SeedSequence([run_seed, kind, group_id]).generate_state(1)
    return int(state[0] >> np.uint32(1))
