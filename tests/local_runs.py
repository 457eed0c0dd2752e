"""Whole runs in this process: real engine, Learner, Scorer and buffer, as `train --local` has them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.context import ServingContext
from grpo_ray.core.controller import Controller
from grpo_ray.errors import first_error
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.run.restores import train_through_restores
from grpo_ray.watch.event_loop import TasksAlongside
from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import RestartBudget
from grpo_ray.watch.run_log import RunLog
from grpo_ray.watch.trackers import tracking

Watcher = Callable[[LocalActors, Controller], Any]  # a coroutine function that interferes with a run


class Recorder:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.steps: list[int] = []
        self.announced: list[str] = []  # by trackers

    def status(self, text: str) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append(step)

    def warning(self, text: str) -> None:
        self.warnings.append(text)

    def take(self) -> list[str]:
        """Return the warnings since the last call."""
        taken, self.warnings = self.warnings, []
        return taken


def make_config(*overrides: str) -> Config:
    fast = ["recovery.restart_backoff_s=0.01", "checkpoint.every_num_steps=2", "learner.learning_rate=1e-2"]
    return load_config(QUICKSTART, [*SMALL, *fast, *overrides])


def train(config: Config, folder: Path, meddle: Watcher | None = None) -> Recorder:
    """Start the run in `folder`, or resume it."""
    prepared, run, recorder = prepare(config, check_files(config)), RunDirectory(folder), Recorder()
    if not run.config_path.exists():
        run.create(config)
    actors: list[LocalActors] = []

    def host(*args: Any) -> LocalActors:
        actors.append(LocalActors(*args))
        return actors[-1]

    def drive(controller: Controller) -> None:
        async def main() -> None:
            running = asyncio.ensure_future(controller.run())
            if meddle is not None:
                meddling = asyncio.ensure_future(meddle(actors[-1], controller))
                await asyncio.wait({running, meddling}, return_when=asyncio.FIRST_COMPLETED)
                if meddling.done():
                    meddling.result()
                meddling.cancel()
            await asyncio.wait_for(running, 600)

        asyncio.run(main())

    with tracking(config, run, recorder.announced.append, recorder.warning) as trackers:
        train_through_restores(config, prepared, run, recorder, host, drive, trackers)
    return recorder


def train_twice(config: Config, folder: Path, kill: Watcher) -> None:
    """Start the run until its driver is killed, then resume it to its end."""
    with pytest.raises(Killed):
        train(config, folder, kill)
    train(config, folder)


class FakeServing:
    """The surroundings of a pool of actors: the given fakes, and real records in `folder`."""

    pool: Any

    def __init__(self, folder: Path, config: Config, actors: Any, max_restarts: int = 5) -> None:
        self.config, self.actors, self.run, self.calls = config, actors, RunDirectory(folder), OpenCalls()
        self.run.create(config)
        self.log = RunLog(self.run, Recorder())
        self.context = ServingContext(config, actors, self.calls, self.log)
        self.budget = RestartBudget("recovery.max_restarts", max_restarts, 0.0)

    @asynccontextmanager
    async def during(self) -> AsyncIterator[TasksAlongside]:
        """Run the subclass's `pool`, and cancel it afterwards, with the other tasks of the group."""
        try:
            async with TasksAlongside() as tasks, asyncio.timeout(120):
                self.pool.start(tasks)
                yield tasks
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors

    def events(self, kind: str) -> list[str]:
        self.log.writer.call("waiting", str).result(20)
        return [e["text"] for e in read_metrics(self.run.events_path) if e["kind"] == kind]


class Killed(BaseException):
    """The death of the driver's process: none of its code runs any more, not even its clean-up."""


def kill_after(num_steps: int, seconds: float) -> Watcher:
    """Kill the driver `seconds` after `num_steps` more steps, on a slow machine and on a fast one alike."""

    async def kill(actors: LocalActors, controller: Controller) -> None:
        version = controller.version + num_steps
        await until(lambda: controller.version >= version)
        await asyncio.sleep(seconds)
        raise Killed

    return kill


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
