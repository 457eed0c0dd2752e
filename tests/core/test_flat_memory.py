"""Memory of a long run: no list, dict or set of the driver or of an actor grows from step to step.

The size of all containers in the process is measured, early and late in a run of the real classes with an
engine and a Learner that compute nothing.
`FLAT_MEMORY_STEPS=20000 pytest tests/core/test_flat_memory.py` is the same over more steps.
"""

import asyncio
import contextvars
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import NonCallableMock

import psutil
import pytest
from local_runs import Recorder, make_config
from process_census import SCANNING

from grpo_ray.cluster.local import LocalClient
from grpo_ray.config import Config
from grpo_ray.core.context import Prepared
from grpo_ray.core.controller import Controller
from grpo_ray.core.groups import State
from grpo_ray.core.scorer import Scorer
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.tools.simulation.actors import SimulatedActors, SimulatedClient
from grpo_ray.tools.simulation.speeds import Speeds, lognormal
from grpo_ray.tools.simulation.workers import Account
from grpo_ray.types import ScoredGroup, StepReport, TrainBatch
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog

STEPS = int(os.environ.get("FLAT_MEMORY_STEPS", "400"))
AROUND, SETTLE_S = 5, 0.5
# A list with an entry for each of the four groups of a step would grow by 32 bytes, a dict by 150 or more.
BYTES_PER_STEP = 24.0

EVERYTHING = [
    "task.curriculum={}", "generator.num_generators=2", "algorithm.oversample_frac=0.5",
    "buffer.replay.frac=0.5", "buffer.replay.max_age=4",
]  # fmt: skip


class Forgetful(Account):
    """The account of a simulated Learner, which would grow with the steps."""

    def note(self, version: int, fresh: Sequence[ScoredGroup], replayed: Sequence[ScoredGroup]) -> None: ...


# Nothing takes time but the tokens, so that groups overlap.
AT_ONCE = dict.fromkeys(("start_s", "stage_s", "load_s", "train_s", "train_token_s", "snapshot_s"), 0.0)


class StubActors(SimulatedActors):
    """Real Generators, Scorer, buffer and WeightSync, with an engine and a Learner that compute nothing."""

    def __init__(self, config: Config, prepared: Prepared, folder: Path, steps: Sequence[int]) -> None:
        self._steps, self.sizes = steps, [Sizes(unknown=sys.maxsize)] * len(steps)
        speeds, account = Speeds(**AT_ONCE, decode_s=1e-4, prefill_token_s=0), Forgetful(config.max_token_age)
        lengths = lognormal(4, 0)
        super().__init__(config, prepared.model, folder, None, speeds=speeds, lengths=lengths, account=account)
        learner = self.learner.actor
        train_step = learner.train_step

        async def measured(batch: TrainBatch) -> StepReport:
            report = await train_step(batch)
            await self.at_step(report.version)
            return report

        learner.train_step = measured

    def _start_generator(self, name: str) -> SimulatedClient:
        """Start a Generator of which now and then a request fails, and is sampled again."""
        client, draw = super()._start_generator(name), random.Random(name)
        engine = client.actor._engine
        generate = engine.generate

        async def sometimes(*args: Any) -> Any:
            if draw.random() < 0.02:
                raise RuntimeError("a request failed")
            return await generate(*args)

        engine.generate = sometimes
        return client

    def _start_scorer(self, name: str) -> Any:
        return LocalClient(name, lambda: Scorer(self._config), next(self._numbers))

    async def at_step(self, step: int) -> None:
        """Measure around each of `steps`, once every group that is admitted has arrived and is written."""
        for place, first in enumerate(self._steps):
            if first <= step < first + AROUND:
                while self.book.num_admissible or self.book.num_in(State.IN_FLIGHT, State.ENTERING):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(SETTLE_S)  # the events about them, too
                await self.buffer.flush()
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
    monkeypatch.setattr("grpo_ray.watch.rollout_writer.MAX_UNSYNCED", 1)  # or up to 64 paths come and go
    steps = [STEPS // 5, STEPS * 3 // 5, STEPS]
    limits = [f"algorithm.num_steps={STEPS + AROUND + 5}", f"checkpoint.every_num_steps={10 * STEPS}"]
    config = make_config(*limits, "evaluation.every_num_steps=20", "run.save_rollouts=true", *overrides)
    prepared, run = prepare(config, check_files(config)), RunDirectory(tmp_path / "run")
    run.create(config)
    actors = StubActors(config, prepared, run.path, steps)
    log = RunLog(run, Quiet())
    budget = RestartBudget("recovery.max_restarts", 0, 1.0)
    store = CheckpointStore(run, config.checkpoint)
    controller = Controller(config, prepared, actors, log, store, budget)  # type: ignore[arg-type]
    actors.book = controller.book
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
