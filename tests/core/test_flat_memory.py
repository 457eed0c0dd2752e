"""Memory of a long run: no list, dict or set of the driver or of an actor grows from step to step.

The size of all containers in the process is measured, early and late in a run of the real classes with an
engine and a Learner that compute nothing.
`FLAT_MEMORY_STEPS=20000 pytest tests/core/test_flat_memory.py` is the same over more steps.
"""

import asyncio
import contextvars
import gc
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMock

import numpy as np
import psutil
import pytest
from local_runs import Recorder, make_config
from process_census import SCANNING

from grpo_ray.cluster.local import LocalActors, LocalClient
from grpo_ray.config import Config
from grpo_ray.core.context import Prepared
from grpo_ray.core.controller import Controller
from grpo_ray.core.generator import Generator
from grpo_ray.core.learner import STAGES
from grpo_ray.records.checkpoint import make_store
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.types import Completion, SamplingSettings, StepReport, TrainBatch
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog
from grpo_ray.watch.stage_clock import ActorStats, StageClock

STEPS = int(os.environ.get("FLAT_MEMORY_STEPS", "200"))
AROUND = 5
SETTLE_S = 0.5
# A list with an entry for each of the four groups of a step would grow by 32 bytes, a dict by 150 or more.
BYTES_PER_STEP = 24.0

EVERYTHING = [
    "task.curriculum={}",
    "generator.num_generators=2",
    "buffer.replay.frac=0.5",
    "buffer.replay.max_age=4",
    "algorithm.oversample_frac=0.5",
]


class StubEngine:
    """An engine that answers at once; now and then a request fails, and is sampled again."""

    def __init__(self, seed: int) -> None:
        self._version, self._rng = 0, np.random.default_rng(seed)

    async def start(self, version: int) -> None:
        self._version = version

    async def generate(
        self, prompt_token_ids: Sequence[int], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        await asyncio.sleep(0)
        if self._rng.random() < 0.02:
            raise RuntimeError("a request failed")
        return tuple(self._completion() for _ in range(settings.num_samples))

    def _completion(self) -> Completion:
        ids, ones = self._rng.integers(5, 50, 4).astype(np.int32), np.ones(4, np.int32)
        text = f" </think> <answer> {self._rng.integers(10)} </answer>"
        return Completion(text, ids, -ones.astype(np.float32), ones * self._version, "stop")

    async def finish(self, version: int) -> None:
        self._version = version

    def __getattr__(self, _: str) -> Any:
        async def nothing(*_: object) -> None: ...

        return nothing


class StubLearner:
    """A Learner without a model."""

    name = "learner"

    def __init__(self, actors: "StubActors") -> None:
        self.version, self._actors = 0, actors
        self._clock = StageClock(STAGES, rest="wait_for_batch")

    async def ready(self) -> bool:
        return True

    async def take_stats(self) -> Any:
        return ActorStats(self._clock.take(), 1)

    async def work_done(self) -> int:
        return self.version

    async def train_step(self, batch: Any) -> StepReport:
        assert isinstance(await batch, TrainBatch)
        with self._clock.stage("train"):
            self.version += 1
        await self._actors.at_step(self.version)
        names = ("loss/policy", "optim/skipped_updates", "optim/skipped_in_a_row", "throughput/trained_tokens")
        return StepReport(self.version, {**dict.fromkeys(names, 0.0), "timing/train_s": 0.1})

    def snapshot(self) -> tuple[Any, Any]:
        async def made() -> WeightSnapshot:
            return WeightSnapshot(version, (), np.zeros(4, np.uint8))

        async def copied() -> int:
            return version

        version = self.version
        return asyncio.ensure_future(made()), asyncio.ensure_future(copied())

    async def capture(self) -> None:
        return None


class StubActors(LocalActors):
    """Real Generators, Scorer, buffer and WeightSync, with an engine and a Learner that compute nothing."""

    def __init__(self, config: Config, prepared: Prepared, folder: Path, steps: Sequence[int]) -> None:
        self._steps, self.sizes = steps, [Sizes(unknown=sys.maxsize)] * len(steps)
        super().__init__(config, prepared.model, folder)
        self.learner = StubLearner(self)  # type: ignore[assignment]

    def _start_generator(self, name: str) -> LocalClient:
        return self._client(name, lambda: Generator(name, StubEngine(len(name)), 0.0, 0))  # type: ignore[arg-type]

    async def at_step(self, step: int) -> None:
        """Measure around each of `steps`; the least has the fewest groups in flight.

        While the Learner waits, every admitted group arrives in the buffer and is written, so that readings on
        a loaded machine count as many groups as on an idle one.
        """
        for place, first in enumerate(self._steps):
            if first <= step < first + AROUND:
                await asyncio.sleep(SETTLE_S)
                self.sizes[place] = min(self.sizes[place], container_bytes(), key=Counter.total)


class Sizes(Counter[str]):
    """Bytes by type; a type of its own, so that no measurement counts an earlier one."""


# asyncio keeps cancelled timers, up to a limit; a mock of another test notes that it is asked for its size.
NOT_COUNTED = (Sizes, asyncio.TimerHandle, contextvars.Context, NonCallableMock)


def container_bytes() -> Sizes:
    """Return the bytes of all containers by type, without what they hold."""
    sizes = Sizes()
    with SCANNING:
        psutil.process_iter.cache_clear()  # of the machine's processes, by the census
        gc.collect()
        for each in gc.get_objects():
            # Not isinstance: it asks the object for its class, and the proxies of a library that another test
            # has imported (openai's, with vLLM) would import what they stand for, while this measures.
            if not issubclass(type(each), NOT_COUNTED):
                sizes[type(each).__name__] += sys.getsizeof(each, 0)  # 0: one that tells no size
    return sizes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("overrides", [[], EVERYTHING], ids=["plain", "everything"])
@pytest.mark.kept("everything")
async def test_memory_does_not_grow_with_the_steps(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_ray.watch.timeline.MAX_BYTES", 2**16)
    steps = [STEPS // 5, STEPS * 3 // 5, STEPS]
    limits = [f"algorithm.num_steps={STEPS + AROUND + 5}", f"checkpoint.every_num_steps={10 * STEPS}"]
    config = make_config(*limits, "evaluation.every_num_steps=20", "run.save_rollouts=true", *overrides)
    prepared, run = prepare(config, check_files(config)), RunDirectory(tmp_path / "run")
    run.create(config)
    actors = StubActors(config, prepared, run.path, steps)
    log = RunLog(run, Quiet())
    budget = RestartBudget("recovery.max_restarts", 0, 1.0)
    store = make_store(config, run)
    controller = Controller(config, prepared, actors, log, store, budget)  # type: ignore[arg-type]
    await controller.run()
    early, middle, late = actors.sizes
    halves = [(middle.total() - early.total()), (late.total() - middle.total())]
    growth = [each / (steps[1] - steps[0]) for each in halves]
    print(f"{growth} bytes per step over {steps[1] - steps[0]} steps each")
    # Groups in flight at one of the readings are in one half only; what leaks is in both.
    assert min(growth) < BYTES_PER_STEP, (late - early).most_common(8)


class Quiet(Recorder):
    """A display that remembers nothing."""

    def step(self, step: int, metrics: dict[str, float]) -> None: ...
    def warning(self, text: str) -> None: ...
