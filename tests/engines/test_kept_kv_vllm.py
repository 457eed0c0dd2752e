"""vLLM with `weight_sync.recompute_kv: false`: keys and values are kept, and no version shares another's."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from builders import ROUNDING, TinyModel, logprob_error, logprobs_over_kept_cache, make_settings, perturb
from test_engines_vllm import ENDS, LONG, Groups, config_of_vllm

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


@pytest.fixture(scope="module")
def served(tiny_model: TinyModel) -> tuple[list[Any], Groups, Groups, Groups]:
    """Models by version, and the groups of version 0, of version 1, and those that further syncs interrupted.

    Requests of the latter were sent before a sync, and during it.
    """
    pytest.importorskip("vllm")
    path = str(tiny_model(hidden_size=64))
    models = [load_policy(path) for _ in range(5)]
    for version in range(1, 5):
        perturb(models[version], seed=version, scale=0.1)
    config = config_of_vllm(weight_sync={"recompute_kv": False})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "")  # as in a checkout that is not installed, which has no entry points
        return models, *asyncio.run(_record(config, path, models))


async def _record(config: Config, path: str, models: list[Any]) -> tuple[Groups, Groups, Groups]:
    engine = make_engine(config, path, max_model_len=384, seed=0)

    def ask(settings: Any) -> "asyncio.Future[list[tuple[Completion, ...]]]":
        return asyncio.gather(*(engine.generate(prompt, settings) for prompt in PROMPTS))

    during: list[asyncio.Future[Groups]] = []
    try:
        await engine.start(0)
        first = await ask(SHORT)
        await _sync(engine, models[1], 1)
        second = await ask(SHORT)
        for version, delay_s in ((2, 0.2), (3, 0.05), (4, 1.0)):  # whatever the machine's speed
            running = ask(LONG)
            await asyncio.sleep(delay_s)
            await _sync(engine, models[version], version, lambda: during.append(ask(SHORT)))
            interrupted = await running
            of_new = await during[-1]
            if all(len(np.unique(c.versions)) == 2 for group in interrupted for c in group):
                break
        return first, second, [*interrupted, *of_new]
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


def assert_all_of(groups: Groups, version: int, models: list[Any]) -> None:
    """Check that every token is of this version, with the logprob that its model gives."""
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            assert (completion.versions == version).all()
            assert logprob_error(models[version], prompt, completion, SHORT).max() < ROUNDING


def test_new_requests_use_no_prefix_of_another_version(
    served: tuple[list[Any], Groups, Groups, Groups],
) -> None:
    """The same prompts, one longer than a block of the cache, before and after a sync."""
    models, *groups, _ = served
    for version, of_version in enumerate(groups):
        assert_all_of(of_version, version, models)


def test_requests_that_arrive_during_a_sync_are_of_the_new_version_alone(
    served: tuple[list[Any], Groups, Groups, Groups],
) -> None:
    models, *_, interrupted = served
    version = int(interrupted[0][0].versions[-1])
    assert_all_of(interrupted[len(PROMPTS) :], version, models)


def test_running_requests_continue_on_the_keys_and_values_that_they_have(
    served: tuple[list[Any], Groups, Groups, Groups],
) -> None:
    models, *_, interrupted = served
    for prompt, group in zip(PROMPTS, interrupted[: len(PROMPTS)], strict=True):
        for completion in group:
            old, new = np.unique(completion.versions)
            assert new == old + 1
            expected = logprobs_over_kept_cache(models, prompt, completion, LONG)
            assert np.abs(expected - completion.logprobs).max() < ROUNDING
            anew = logprob_error(models[new], prompt, completion, LONG)
            assert anew[completion.versions == new].max() > max(1e-3, 2 * ROUNDING)
