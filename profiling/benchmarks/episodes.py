"""Episodes on one event loop: five turns each, with an environment and a Generator that only sleep.

Memory is the growth of this process while the episodes run. Lag is the delay of a timer on the same loop: all
episodes start at the same moment, so its maximum is the work of one turn of all of them.
"""

import asyncio
import gc
import time
from collections.abc import Sequence

import aiohttp
import numpy as np
import psutil
from transformers import PreTrainedTokenizerBase

from benchmarks.results import Options, Row
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.limits import Limits
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner
from grpo_ray.episodes.session import Session
from grpo_ray.models.plain_chat import give_plain_chat
from grpo_ray.models.tiny import tiny_tokenizer
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Completion, SamplingSettings

TITLE = "concurrent episodes of 5 turns on one event loop: throughput, memory, lag"
TURNS, REPLY_TOKENS, SLEEP_S, TICK_S = 5, 32, 0.5, 0.01
QUESTION = "Where am I? Say it in a few words, or ask for a hint."


class SleepingSampler:
    """A Generator that answers with random tokens after a while."""

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        await asyncio.sleep(SLEEP_S)
        ids = np.append(np.random.default_rng(len(prompt_token_ids)).integers(20, 250, REPLY_TOKENS - 1), 0)
        logprobs, versions = np.full(REPLY_TOKENS, -1.0, np.float32), np.zeros(REPLY_TOKENS, np.int32)
        return Completion("a reply of some words", ids.astype(np.int32), logprobs, versions, "stop")


async def in_process(session: Session, example: Example) -> float:
    messages = [{"role": "user", "content": example.question}]
    for _ in range(TURNS):
        messages += [(await session.chat(messages)).message, {"role": "user", "content": "A hint: go on."}]
        await asyncio.sleep(SLEEP_S)
    return 1.0


async def over_http(session: Session, example: Example) -> float:
    messages = [{"role": "user", "content": example.question}]
    async with aiohttp.ClientSession() as http:
        for _ in range(TURNS):
            async with http.post(f"{session.base_url}/chat/completions", json={"messages": messages}) as answer:
                reply = (await answer.json())["choices"][0]["message"]
            messages += [reply, {"role": "user", "content": "A hint: go on."}]
            await asyncio.sleep(SLEEP_S)
    return 1.0


def run(options: Options) -> list[Row]:
    few, many = (5, 20) if options.quick else (100, 1000)
    rounds = options.rounds or (1 if options.quick else 3)
    tokenizer = tiny_tokenizer(load_config("configs/quickstart.yaml", []))
    give_plain_chat(tokenizer)
    cases: dict[str, tuple[EpisodeFn, int]] = {
        f"{few} episodes": (in_process, few),
        f"{many} episodes": (in_process, many),
        f"{many} episodes over HTTP": (over_http, many),
    }
    rows = []
    for name, (episode, number) in cases.items():
        asyncio.run(_measure(episode, few, tokenizer))  # warms up
        results = [asyncio.run(_measure(episode, number, tokenizer)) for _ in range(rounds)]
        seconds, lags, sizes = zip(*results, strict=True)
        facts = {
            "lag ms, median": float(np.median(np.concatenate(lags)) * 1e3),
            "lag ms, 99%": float(np.quantile(np.concatenate(lags), 0.99) * 1e3),
            "lag ms, max": float(np.max(np.concatenate(lags)) * 1e3),
            "KiB per episode": max(sizes) / number / 1024,
        }
        rows.append(Row(name, seconds, f"{few} episodes", number, "episodes", facts))
    return rows


async def _measure(
    episode: EpisodeFn, number: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, Sequence[float], int]:
    """Return the seconds of all episodes, the lag of each tick (seconds), and the growth of memory (bytes)."""
    server = ChatServer()
    await server.start()
    runner = EpisodeRunner(episode, server=server)
    settings = SamplingSettings(1, 1.0, 1.0, 0, REPLY_TOKENS)
    template, sampler, limits = ChatTemplate(tokenizer, [tokenizer.eos_token_id]), SleepingSampler(), Limits()
    gc.collect()
    process, lags = psutil.Process(), []
    before = peak = process.memory_info().rss
    started = time.perf_counter()
    sessions = [Session(sampler, settings, template, limits) for _ in range(number)]
    runs = asyncio.gather(*(runner.run(session, Example(QUESTION, "")) for session in sessions))
    while not runs.done():
        asked = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - asked - TICK_S)
        peak = max(peak, process.memory_info().rss)
    results, seconds = await runs, time.perf_counter() - started
    await server.stop()
    assert all(result.status is Status.FINISHED for result in results), {result.error for result in results}
    return seconds, lags, peak - before
