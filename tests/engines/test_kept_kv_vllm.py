"""vLLM with `weight_sync.recompute_kv: false`: keys and values are kept, and no version shares another's."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import ENDS, ROUNDING, TinyModel, logprob_error, logprobs_over_kept_cache, make_settings, perturb
from test_engines_vllm import LONG, Groups, config_of_vllm

from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.engines.base import Engine
from grpo_ray.learning.loading import load_policy
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import Completion

pytestmark = pytest.mark.vllm

# The longer one fills a block of vLLM's prefix cache (128 tokens on a CPU).
PROMPTS = [tuple(range(40, 240)), (60, 61, 62)]
SHORT = make_settings(num_samples=2, temperature=0.7, max_tokens=12, end_token_ids=ENDS)


Record = tuple[list[Any], dict[int, Groups], Groups]


@pytest.fixture(scope="module")
def record(tiny_model: TinyModel) -> Record:
    """The models by version, groups by their only version, and those that a sync interrupted.

    The groups of the last version were requested while the sync began that brought it.
    """
    pytest.importorskip("vllm")
    path = str(tiny_model(tied=False, hidden_size=64, own=True))
    models = [load_policy(path) for _ in range(5)]
    for version in range(1, 5):
        perturb(models[version], seed=version, scale=0.1)
    config = config_of_vllm(weight_sync={"recompute_kv": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")  # as in a checkout that is not installed, which has no entry points
        return models, *asyncio.run(_record(config, path, models))


async def _record(config: Config, path: str, models: list[Any]) -> tuple[dict[int, Groups], Groups]:
    engine = make_engine(config, path, max_model_len=384, seed=0)

    def ask(settings: Any) -> "asyncio.Future[list[tuple[Completion, ...]]]":
        return asyncio.gather(*(engine.generate(prompt, settings) for prompt in PROMPTS))

    during: list[asyncio.Future[Groups]] = []
    try:
        await engine.start(0)
        pure = {0: await ask(SHORT)}
        await _sync(engine, models[1], 1)
        pure[1] = await ask(SHORT)
        for version, delay_s in ((2, 0.2), (3, 0.05), (4, 1.0)):  # whatever the machine's speed
            running = ask(LONG)
            await asyncio.sleep(delay_s)
            await _sync(engine, models[version], version, lambda: during.append(ask(SHORT)))
            interrupted, of_new = await running, await during[-1]
            if all(len(np.unique(c.versions)) == 2 for group in interrupted for c in group):
                break
        return {**pure, version: of_new}, interrupted
    finally:
        await engine.shutdown()


async def _sync(engine: Engine, model: Any, version: int, at_pause: Callable[[], None] = lambda: None) -> None:
    await engine.stage(pack_weights(model.named_parameters(), version, torch.float32))
    pausing = asyncio.create_task(engine.pause())
    await asyncio.sleep(0)  # it has begun to pause
    at_pause()
    await pausing
    await engine.load()
    await engine.finish(version)
    await engine.resume()


def test_requests_use_no_prefix_of_another_version(record: Record) -> None:
    """The same prompts, one longer than a block of the cache, before a sync, after it, and during another."""
    models, pure, _ = record
    assert len(pure) == 3
    for version, groups in pure.items():
        for prompt, group in zip(PROMPTS, groups, strict=True):
            for completion in group:
                assert (completion.versions == version).all()
                assert logprob_error(models[version], prompt, completion, SHORT).max() < ROUNDING


def test_running_requests_continue_on_the_keys_and_values_that_they_have(record: Record) -> None:
    models, _, interrupted = record
    for prompt, group in zip(PROMPTS, interrupted, strict=True):
        for completion in group:
            old, new = np.unique(completion.versions)
            assert new == old + 1
            expected = logprobs_over_kept_cache(models, prompt, completion, LONG)
            assert np.abs(expected - completion.logprobs).max() < ROUNDING
            anew = logprob_error(models[new], prompt, completion, LONG)
            assert anew[completion.versions == new].max() > max(1e-3, 2 * ROUNDING)
