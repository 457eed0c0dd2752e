"""Episodes in one process: five turns each, with an environment and a Generator that only sleep.

They run on one event loop, or as an EnvironmentWorker plays them: groups of 8, each in a thread of its own.
Memory is the growth of this process while the episodes run, and threads and open files are the most that it has
more than before. Lag is the delay of a timer on the same loop: all episodes start at the same moment, so its
maximum is the work of one turn of all of them.
"""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping

import aiohttp
import numpy as np
import psutil

from benchmarks.played_turns import HINT, SLEEP_S, sleeping
from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.turn_box import FinishedTurns, Turn, TurnBox, Worker
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.plain_chat import TEMPLATE
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Completion, PromptItem, SamplingSettings, StartingModel

TITLE = "concurrent episodes of 5 turns in one process: throughput, memory, lag"
TURNS, REPLY_TOKENS, TICK_S, GROUP = 5, 32, 0.01, 8
QUESTION = "Where am I? Say it in a few words, or ask for a hint."
EXAMPLE = Example(QUESTION, str(TURNS))


class SleepingSampler:
    """A Generator that answers with random tokens after a while."""

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        await asyncio.sleep(SLEEP_S)
        ids = np.append(np.random.default_rng(len(prompt_token_ids)).integers(20, 250, REPLY_TOKENS - 1), 0)
        logprobs, versions = np.full(REPLY_TOKENS, -1.0, np.float32), np.zeros(REPLY_TOKENS, np.int32)
        return Completion("a reply of some words", ids.astype(np.int32), logprobs, versions, "stop")


class SleepingGenerator:
    """Such a Generator as an EnvironmentWorker asks it."""

    def __init__(self) -> None:
        self._box = TurnBox(SleepingSampler().sample)

    async def begin_turns(self, worker: Worker, turns: Mapping[int, Turn], cancelled: Collection[int]) -> None:
        self._box.begin(turns, cancelled)

    async def finished_turns(self, worker: Worker) -> FinishedTurns:
        return await self._box.finished()


async def over_http(session: Session, example: Example) -> float:
    messages = [{"role": "user", "content": example.question}]
    async with aiohttp.ClientSession() as http:
        for _ in range(int(example.ground_truth)):
            async with http.post(f"{session.base_url}/chat/completions", json={"messages": messages}) as answer:
                reply = (await answer.json())["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": HINT}]
            await asyncio.sleep(SLEEP_S)
    return 1.0


class Watch:
    """This process, while the episodes run."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.seconds, self.lags = 0.0, list[float]()  # of each tick, in seconds
        self.most = self._before = self._now()

    def _now(self) -> np.ndarray:
        return np.array([self._process.memory_info().rss, threading.active_count(), self._process.num_fds()])

    @property
    def growth(self) -> np.ndarray:
        """Bytes, threads and open files more than before."""
        return np.asarray(self.most - self._before)

    async def tick(self) -> None:
        while True:
            asked = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.lags.append(time.perf_counter() - asked - TICK_S)
            self.most = np.maximum(self.most, self._now())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        started, ticking = time.perf_counter(), asyncio.ensure_future(self.tick())
        try:
            yield
        finally:
            self.seconds = time.perf_counter() - started
            ticking.cancel()


Play = Callable[[int, str], Coroutine[object, object, Watch]]  # the number of episodes, and the model's folder


def run(options: Options) -> list[Row]:
    few, many = (8, 24) if options.quick else (100, 1000)
    rounds = options.rounds or (1 if options.quick else 3)
    cases: dict[str, tuple[Play, int]] = {
        f"{few} episodes": (_on_one_loop(sleeping), few),
        f"{many} episodes": (_on_one_loop(sleeping), many),
        f"{many} episodes in a worker": (_in_worker, many),
        f"{many} episodes over HTTP": (_on_one_loop(over_http), many),
    }
    rows = []
    with model_folder() as folder:
        tokenizer = load_tokenizer(folder)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        for name, (play, number) in cases.items():
            asyncio.run(play(few, folder))  # warms up
            gc.collect()
            watches = [asyncio.run(play(number, folder)) for _ in range(rounds)]
            lags = np.concatenate([watch.lags for watch in watches]) * 1e3
            num_bytes, threads, files = np.max([watch.growth for watch in watches], 0).tolist()
            facts = {
                "lag ms, median": float(np.median(lags)),
                "lag ms, 99%": float(np.quantile(lags, 0.99)),
                "lag ms, max": float(np.max(lags)),
                "KiB per episode": num_bytes / number / 1024,
                "threads": threads,
                "open files": files,
            }
            seconds = tuple(watch.seconds for watch in watches)
            rows.append(Row(name, seconds, f"{few} episodes", number, "episodes", facts))
    return rows


def _on_one_loop(episode: EpisodeFn) -> Play:
    """Return a function that runs the episodes on this loop."""

    async def play(number: int, folder: str) -> Watch:
        tokenizer = load_tokenizer(folder)
        server = ChatServer()
        await server.start()
        runner = EpisodeRunner(episode, server=server)
        settings = SamplingSettings(1, 1.0, 1.0, 0, REPLY_TOKENS)
        template, sampler = ChatTemplate(tokenizer, [tokenizer.eos_token_id]), SleepingSampler()
        watch = Watch()
        sessions = [Session(sampler.sample, settings, template, EpisodesConfig()) for _ in range(number)]
        with watch.watching():
            results = await asyncio.gather(*(runner.run(session, EXAMPLE) for session in sessions))
        await server.aclose()
        assert all(result.status == Status.FINISHED for result in results), {r.error for r in results}
        return watch

    return play


async def _in_worker(number: int, folder: str) -> Watch:
    """Play the episodes as groups in an EnvironmentWorker in this process."""
    names = {"episode": "sleeping", "examples": "examples"}
    task = ", ".join(f"{field}: 'profiling.benchmarks.played_turns:{name}'" for field, name in names.items())
    task = f"task={{kind: episodes, {task}}}"
    config = load_config(QUICKSTART, [task, f"episodes.max_concurrent={number}", "episodes.confined=false"])
    model = StartingModel(folder, (load_tokenizer(folder).eos_token_id,), 4096)
    worker = EnvironmentWorker("environment-0", config, model)
    await worker.ready()
    await worker.serve({0: SleepingGenerator()})  # type: ignore[dict-item]  # it answers no ping
    settings = SamplingSettings(GROUP, 1.0, 1.0, 0, REPLY_TOKENS)
    items = [PromptItem(n, QUESTION, (1,), str(TURNS)) for n in range(number // GROUP)]
    watch = Watch()
    with watch.watching():
        groups = await asyncio.gather(*(worker.play(item, settings, 0) for item in items))
    assert all(report.num_tokens == GROUP * TURNS * REPLY_TOKENS for _, report in groups)
    return watch
