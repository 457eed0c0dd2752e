"""Episodes through a run's actors, against vLLM's AsyncLLM alone with one request per turn.

Episodes run in an EnvironmentWorker, which asks a Generator: groups of 8, with 256 episodes in flight. The
engine alone, in an actor of its own, gets one request per turn, with prompts and replies of the same lengths:
all at once, so it never waits (an upper bound), or turn after turn as an episode would, 256 at a time. The
plain path samples as many tokens in groups of 8 responses to one prompt, 256 at a time.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from benchmarks.played_turns import HINT
from benchmarks.results import Options, Row
from benchmarks.sampling import Alone, start_alone, take_turns
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.cluster.hosting import ServingGroup
from grpo_ray.cluster.remote_actor import Client
from grpo_ray.cluster.session import connected, placed
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer
from grpo_ray.learning.plain_chat import TEMPLATE
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.types import PromptItem, SamplingSettings, StartingModel

TITLE = "episodes of k turns through the actors, against AsyncLLM alone with the same turns"
TAKES_OVERRIDES = True
SAMPLES, IN_FLIGHT, MAX_TURNS = 8, 256, 5
SHAPES = ((1, 16, 64), (5, 16, 40), (1, 64, 40), (5, 64, 32))  # turns, tokens of each reply, groups
AT_ONCE, CHAINED, PLAIN, EPISODES = "alone, at once", "alone, turn by turn", "plain groups", "episodes"

Tokens = tuple[int, ...]


class Turns(Alone):
    """An engine that samples turns for their number of tokens alone."""

    async def chains(
        self, prompts: list[Tokens], suffix: Tokens, turns: int, settings: SamplingSettings
    ) -> int:
        """Sample turn after turn behind each prompt, `IN_FLIGHT` of them at a time."""
        places = asyncio.Semaphore(IN_FLIGHT)
        return sum(await asyncio.gather(*(self._chain(p, suffix, turns, settings, places) for p in prompts)))

    async def _chain(
        self, prompt: Tokens, suffix: Tokens, turns: int, settings: SamplingSettings, places: asyncio.Semaphore
    ) -> int:
        num_tokens = 0
        async with places:
            for _ in range(turns):
                (completion,) = await self._engine.generate(prompt, settings)
                num_tokens += len(completion.token_ids)
                prompt = (*prompt, *completion.token_ids.tolist(), *suffix)
        return num_tokens


def run(options: Options) -> list[Row]:
    shapes = ((2, 8, 2),) if options.quick else SHAPES
    engine = ["generator.engine=torch", "weight_sync.max_lag=1"] if options.quick else []
    played = ("episode", "examples")
    config = load_config(
        QUICKSTART,
        [
            "task={kind: episodes, "
            + ", ".join(f"{name}: 'profiling.benchmarks.played_turns:{name}'" for name in played)
            + "}",
            "episodes.max_concurrent=100000",
            "run.save_rollouts=false",
            *engine,
            *options.overrides,
        ],
    )
    with connected(), model_folder() as folder, tempfile.TemporaryDirectory() as run_dir:
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        longest = max(turns * (tokens + 30) + 30 for turns, tokens, _ in shapes)
        model = StartingModel(folder, end_token_ids(folder, tokenizer), min(longest, 512))
        logs = RunDirectory(Path(run_dir)).logs
        with placed(config) as placement, ServingGroup(placement, config, model, Path(run_dir)) as actors:
            return asyncio.run(_measure(config, model, actors, logs, shapes, options))


async def _measure(
    config: Config,
    model: StartingModel,
    actors: ServingGroup,
    logs: Path,
    shapes: tuple[tuple[int, int, int], ...],
    options: Options,
) -> list[Row]:
    alone = start_alone(Turns, config, model, logs)
    await asyncio.gather(alone.ready(), *(actor.ready() for actor in actors.by_name().values()))
    (worker,) = actors.environments.values()
    await worker.serve(dict(enumerate(actors.generators.values())))
    sides = _Sides(alone, actors, ChatTemplate(load_tokenizer(model.path), model.end_token_ids))
    rows = []
    for turns, num_tokens, num_groups in shapes:
        settings = SamplingSettings(SAMPLES, 1.0, 1.0, num_tokens, num_tokens, (), model.end_token_ids)
        rounds = options.rounds or (1 if options.quick else 3)
        work = num_groups * SAMPLES * turns * num_tokens
        cases = sides.cases(turns, num_groups, settings)
        rows += await take_turns(cases, f"{turns} x {num_tokens}", work, rounds)
    await alone.shutdown()
    ray.kill(alone.handle)
    return rows


class _Sides:
    """The ways to the same number of sampled tokens."""

    def __init__(self, alone: Client, actors: ServingGroup, template: ChatTemplate) -> None:
        self._alone, self._template = alone, template
        (self._worker,) = actors.environments.values()
        (self._generator,) = actors.generators.values()
        self._ids = itertools.count()
        known = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        asked = [*known, {"role": "user", "content": HINT}]
        self._suffix = template.suffix(asked, len(known), last_token=-1)

    def cases(self, turns: int, num_groups: int, settings: SamplingSettings) -> dict[str, Callable[[int], Any]]:
        """Return each side's work; each call has prompts of its own, so that no prefix is cached."""

        def items(number: int) -> list[PromptItem]:
            ids = [next(self._ids) for _ in range(number)]
            texts = [f"Sort {(7919 * n) % 100003:05d}: where am I?" for n in ids]
            prompts = [self._template.prompt([{"role": "user", "content": text}]) for text in texts]
            return [
                PromptItem(n, text, prompt, str(turns))
                for n, text, prompt in zip(ids, texts, prompts, strict=True)
            ]

        def prompts() -> list[Tokens]:
            return [item.prompt_token_ids for item in items(num_groups) for _ in range(SAMPLES)]

        one = replace(settings, num_samples=1)
        return {
            AT_ONCE: lambda _: self._alone.wave(self._all_turns(prompts(), turns, one.max_tokens), one),
            CHAINED: lambda _: self._alone.chains(prompts(), self._suffix, turns, one),
            PLAIN: lambda _: self._windowed(items(num_groups * turns), settings, self._generate),
            EPISODES: lambda _: self._windowed(items(num_groups), settings, self._play),
        }

    def _all_turns(self, prompts: list[Tokens], turns: int, num_tokens: int) -> list[Tokens]:
        """Return a prompt per turn, with random tokens for the replies so far."""
        longer: list[Tokens] = []
        for turn in range(turns):
            for n, prompt in enumerate(prompts):
                replies = [
                    tuple((20 + 13 * n + 5 * t + k) % 280 for k in range(num_tokens)) for t in range(turn)
                ]
                longer.append((*prompt, *(token for reply in replies for token in (*reply, *self._suffix))))
        return longer

    async def _windowed(
        self,
        items: list[PromptItem],
        settings: SamplingSettings,
        sample: Callable[[PromptItem, SamplingSettings], Awaitable[int]],
    ) -> int:
        places = asyncio.Semaphore(IN_FLIGHT // SAMPLES)

        async def one(item: PromptItem) -> int:
            async with places:
                return await sample(item, settings)

        return sum(await asyncio.gather(*map(one, items)))

    async def _generate(self, item: PromptItem, settings: SamplingSettings) -> int:
        _, num_tokens = self._generator.generate(item, settings)
        return int(await num_tokens)

    async def _play(self, item: PromptItem, settings: SamplingSettings) -> int:
        _, report = self._worker.play(item, settings, 0)
        return int((await report).num_tokens)
