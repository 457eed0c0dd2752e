"""Sampling by both engines on this machine, by the number of concurrent groups."""

import asyncio
import os
import time
from collections.abc import Sequence

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.config.loading import load_config
from grpo_ray.engines import make_engine
from grpo_ray.engines.base import Engine
from grpo_ray.types import SamplingSettings

TITLE = "sampling by the vLLM and the torch engine, by concurrent groups (quickstart's model, random)"
SAMPLES, TOKENS, PROMPT_TOKENS = 8, 64, 12


def run(options: Options) -> list[Row]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # before vLLM is imported
    at_a_time = (2,) if options.quick else (1, 8, 32)
    rounds = options.rounds or (1 if options.quick else 5)
    rows = []
    with model_folder() as folder:
        for engine in ("torch",) if options.quick else ("torch", "vllm"):
            rows += asyncio.run(_measure(engine, folder, at_a_time, rounds))
    return rows


async def _measure(name: str, folder: str, at_a_time: Sequence[int], rounds: int) -> list[Row]:
    config = load_config(QUICKSTART, [f"generator.engine={name}", "weight_sync.max_lag=1"])
    engine = make_engine(config, folder, PROMPT_TOKENS + TOKENS, seed=0)
    seconds: dict[int, list[float]] = {number: [] for number in at_a_time}
    try:
        await engine.start(0)
        for turn in range(rounds + 1):
            for number, values in seconds.items():
                started = time.perf_counter()
                await _sample(engine, number)
                if turn:  # an engine's first batches are several times slower
                    values.append(time.perf_counter() - started)
    finally:
        await engine.shutdown()
    return [
        Row(
            f"{name}, {number} groups at a time",
            tuple(values),
            f"torch, {number} groups at a time",
            number * SAMPLES * TOKENS,
            "tokens",
        )
        for number, values in seconds.items()
    ]


async def _sample(engine: Engine, num_groups: int) -> None:
    """Sample responses of full length to different prompts, so that no prefix is cached."""
    settings = SamplingSettings(
        num_samples=SAMPLES,
        temperature=1.0,
        top_p=1.0,
        min_tokens=TOKENS,
        max_tokens=TOKENS,
        end_token_ids=(0,),
    )
    prompts = [tuple((20 + 7 * n + k) % 280 for k in range(PROMPT_TOKENS)) for n in range(num_groups)]
    groups = await asyncio.gather(*(engine.generate(prompt, settings) for prompt in prompts))
    assert all(len(c.token_ids) == TOKENS for group in groups for c in group)
