"""Sampling through a run's actors, from the prompt to the buffer, against vLLM's AsyncLLM alone.

The actors are a run's own, without the Learner, which would be idle. The other side is an engine in a Ray actor
too, so that its processes have the same priority and environment; it is asked for the same requests, and only
counts their tokens. Both engines are up all the time and the two sides take turns, each with whole waves of
requests: a wave is sent at once, and over when its last group has arrived.
"""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import psutil
import ray

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.cluster.hosting import ServingGroup
from grpo_ray.cluster.kinds import BUFFER, Deferred, Kind
from grpo_ray.cluster.remote_actor import Client, as_actor
from grpo_ray.cluster.session import connected, placed
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.context import ServingContext
from grpo_ray.core.pool import GeneratorPool
from grpo_ray.engines import make_engine
from grpo_ray.engines.base import Engine
from grpo_ray.engines.vllm_engine import VllmEngine, _sampling_params, only_output
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.types import PromptItem, SamplingSettings, StartingModel
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog

TITLE = "sampling through the actors (Learner idle), against AsyncLLM alone with the same requests"
TAKES_OVERRIDES = True
SAMPLES, PROMPT_TOKENS, GROUPS = 8, 12, 32
RAW, ACTORS = "AsyncLLM alone", "through the actors"


class Alone:
    """An engine that samples waves of requests for their number of tokens alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._ids = engine, itertools.count()

    async def ready(self) -> bool:
        if isinstance(self._engine, VllmEngine):
            from grpo_ray.engines import vllm_texts

            vllm_texts.processor.from_new_request = classmethod(vllm_texts.original)
        await self._engine.start(0)
        return True

    async def wave(self, prompts: list[tuple[int, ...]], settings: SamplingSettings) -> int:
        return sum(await asyncio.gather(*(self._num_tokens(prompt, settings) for prompt in prompts)))

    async def _num_tokens(self, prompt: tuple[int, ...], settings: SamplingSettings) -> int:
        if not isinstance(self._engine, VllmEngine):
            completions = await self._engine.generate(prompt, settings)
            return sum(len(completion.token_ids) for completion in completions)
        params = _sampling_params(settings)
        params.detokenize = True
        request_id = f"raw-{next(self._ids)}"
        request = self._engine._llm.generate({"prompt_token_ids": prompt}, params, request_id)
        return sum(len(sample.token_ids) for sample in (await only_output(request)).outputs)

    async def shutdown(self) -> None:
        await self._engine.shutdown()


def run(options: Options) -> list[Row]:
    is_given = any(override.startswith("model.path=") for override in options.overrides)
    lengths = (16,) if options.quick else (64, 24) if is_given else (192, 16)
    num_groups = 8 if is_given else GROUPS
    rounds = options.rounds or (1 if options.quick else 8)
    engine = ["generator.engine=torch", "weight_sync.max_lag=1"] if options.quick else []
    config = load_config(
        QUICKSTART,
        [
            f"sampling.max_tokens={max(lengths)}",
            f"algorithm.prompts_per_step={num_groups}",
            "run.save_rollouts=false",
            *engine,
            *options.overrides,
        ],
    )
    given = config.model.path  # python profiling/bench.py sampling model.tiny=null model.path=FOLDER ...
    own = contextlib.nullcontext(given) if given is not None else model_folder()
    with connected(), own as folder, tempfile.TemporaryDirectory() as run_dir:
        ends = end_token_ids(folder, load_tokenizer(folder))
        model = StartingModel(folder, ends, PROMPT_TOKENS + max(lengths))
        run = RunDirectory(Path(run_dir))
        with placed(config) as placement, ServingGroup(placement, config, model, run.path) as actors:
            return asyncio.run(_measure(config, model, actors, run, lengths, rounds))


async def _measure(
    config: Config, model: StartingModel, actors: ServingGroup, run: RunDirectory, lengths: tuple[int, ...],
    rounds: int,
) -> list[Row]:  # fmt: skip
    num_groups = config.algorithm.prompts_per_step
    alone = start_alone(Alone, config, model, run.logs)
    through = _Through(config, actors, run)
    await asyncio.gather(alone.ready(), *(actor.ready() for actor in actors.by_name().values()))
    rows = []
    for num_tokens in lengths:
        settings = SamplingSettings(
            SAMPLES, 1.0, 1.0, num_tokens, num_tokens, config.sampling.stop, model.end_token_ids
        )
        waves: dict[str, Callable[[int], Awaitable[int]]] = {
            RAW: lambda number, settings=settings: alone.wave(_prompts(number, num_groups), settings),  # type: ignore[misc]
            ACTORS: lambda number, settings=settings: through.wave(_prompts(number, num_groups), settings),  # type: ignore[misc]
        }
        work, per_round = num_groups * SAMPLES * num_tokens, max(1, 64 // num_tokens)
        rows += await take_turns(waves, f"{num_tokens} tokens", work, rounds, per_round)
    await alone.shutdown()
    for client in (alone, through.buffer):
        ray.kill(client.handle)
    return rows


async def take_turns(
    sides: Mapping[str, Callable[[int], Awaitable[int]]], shape: str, work: int, rounds: int, per_round: int = 1
) -> list[Row]:
    """Return a row per side: the seconds of its waves, and the CPU seconds of each kind of process in one.

    Args:
        sides: functions of a wave's number, which return its tokens; the first is the baseline.
        work: tokens of a wave.
    """
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, Counter[str]] = {side: Counter() for side in sides}
    for turn in range(rounds + 1):
        for side, wave in sides.items():
            before, started = cpu_seconds(), time.perf_counter()
            for number in range(per_round):
                assert await wave(turn * per_round + number) == work, side
            if turn:  # an engine's first waves are several times slower
                seconds[side].append((time.perf_counter() - started) / per_round)
                cpu[side].update(_spent_since(before))
    base, num_waves = f"{shape}, {next(iter(sides))}", rounds * per_round
    return [
        Row(
            f"{shape}, {side}",
            tuple(values),
            base,
            work,
            "tokens",
            {
                f"CPU s, {name}": total / num_waves
                for name, total in cpu[side].items()
                if total > 0.005 * num_waves
            },
        )
        for side, values in seconds.items()
    ]


def start_alone(kind: type[Alone], config: Config, model: StartingModel, logs: Path) -> Client:
    engine = Deferred(lambda: make_engine(config, model.path, model.max_model_len, seed=0))
    actor = as_actor(Kind(kind, kind), "alone", logs).options(num_cpus=0, max_concurrency=100)
    return Client("alone", actor.remote(engine))


class _Through:
    """A run's way from a prompt to the buffer, by the run's own GeneratorPool."""

    def __init__(self, config: Config, actors: ServingGroup, run: RunDirectory) -> None:
        run.create(config)
        buffer = as_actor(BUFFER, "buffer", run.logs).options(num_cpus=0, max_concurrency=10_000)
        self.buffer = Client("buffer", buffer.remote(config))
        self._context = ServingContext(config, actors, OpenCalls(), RunLog(run, _Silent()))
        self._pools: dict[SamplingSettings, GeneratorPool] = {}
        self._num_waves = 0

    def _pool(self, settings: SamplingSettings) -> GeneratorPool:
        if settings not in self._pools:
            budget = RestartBudget("recovery.max_restarts", 0, 0.0)
            self._pools[settings] = GeneratorPool(self._context, cast(Any, None), settings, budget)  # no syncs
        return self._pools[settings]

    async def wave(self, prompts: list[tuple[int, ...]], settings: SamplingSettings) -> int:
        pool = self._pool(settings)
        before = pool.num_sampled_tokens
        first = self._num_waves * len(prompts)
        self._num_waves += 1

        async def produce(item: PromptItem) -> None:
            scored = await pool.sample(item, SAMPLES, "train")
            assert scored is not None
            await self.buffer.put(*scored)

        items = [PromptItem(first + n, "prompt", prompt, "0") for n, prompt in enumerate(prompts)]
        await asyncio.gather(*map(produce, items))
        _, facts = self.buffer.take(self._num_waves, [item.group_id for item in items], (), 0)
        await facts
        return pool.num_sampled_tokens - before


class _Silent:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _prompts(wave: int, num_groups: int) -> list[tuple[int, ...]]:
    """Make different prompts, so that no prefix is cached."""
    rows = range(wave * num_groups, (wave + 1) * num_groups)
    return [tuple((20 + n // 17 + 7 * n * k + k) % 280 for k in range(PROMPT_TOKENS)) for n in rows]


def cpu_seconds() -> dict[tuple[int, str], float]:
    """Return the CPU seconds of this process and all its descendants so far."""
    me = psutil.Process()
    seconds = {}
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
            seconds[process.pid, "driver" if process == me else _name(process)] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return seconds


def _name(process: Any) -> str:
    line = process.cmdline()
    title: str = line[0] if line else process.name()
    if title.startswith("ray::"):
        return title.removeprefix("ray::").partition(":")[0].partition(".")[0]
    return "engine" if "EngineCore" in title else "Ray's own"


def _spent_since(before: Mapping[tuple[int, str], float]) -> Counter[str]:
    spent: Counter[str] = Counter()
    for (pid, name), seconds in cpu_seconds().items():
        spent[name] += seconds - before.get((pid, name), 0.0)  # type: ignore[assignment]
    return spent
