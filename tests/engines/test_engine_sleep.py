"""vLLM's sleep in a colocated run, with an engine that records what it is asked: no GPU is needed."""

import asyncio
from typing import Any

import pytest

from grpo_ray.engines.vllm_engine import VllmEngine


class Recorder:
    """Stands in for AsyncLLM."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        async def ask(*arguments: Any, **options: Any) -> None:
            self.asked.append(" ".join(map(str, [name, *arguments, *options.values()])))

        return ask


@pytest.fixture
def engine() -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm, engine._resumed = Recorder(), asyncio.Event()  # type: ignore[assignment]
    engine._sleeps, engine._lacks_cache, engine._num_pauses = True, False, 0
    return engine


async def test_weights_wake_for_the_sync_and_the_cache_after_it(engine: VllmEngine) -> None:
    await engine.sleep()
    await engine.wake()
    await engine.pause()
    await engine.resume()
    await engine.pause()
    await engine.resume()  # of another sync in the same turn
    assert engine._llm.asked == [
        "sleep 2",
        "wake_up ['weights']",
        "pause_scheduler_async keep False",
        "wake_up ['kv_cache']",
        "resume_generation",
        "pause_scheduler_async keep False",
        "resume_generation",
    ]


async def test_an_engine_that_is_not_colocated_never_sleeps(engine: VllmEngine) -> None:
    engine._sleeps = False
    await engine.sleep()
    await engine.wake()
    assert engine._llm.asked == []
