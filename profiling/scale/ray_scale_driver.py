"""The driver of one run on real Ray with simulated engines; profiling/scale/ray_scale.py starts it.

    python profiling/scale/ray_scale_driver.py PLAN RUN

PLAN is a JSON file (`Plan`), and RUN the run's folder, which receives `measured.json` as the run ends. Of the
actors engines, Learner and Scorers are simulated, several Generators in each process; controller, producer,
buffer, WeightSync, placement and recovery are the run's own.
"""

import asyncio
import contextlib
import cProfile
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray_scale import Measured, Plan
from ray_scale_processes import AccountingLearner, EngineProcess, LogicalHandle, account_path, read_account

from grpo_ray.cluster import session
from grpo_ray.cluster.hosting import ActorGroup
from grpo_ray.cluster.kinds import Kind
from grpo_ray.cluster.placement import LEARNER, names_of
from grpo_ray.cluster.remote_actor import Client, as_actor
from grpo_ray.cluster.session import Placement
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.controller import Controller
from grpo_ray.core.groups import GroupBook
from grpo_ray.records.checkpoint import Checkpoint
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.restores import train_through_restores
from grpo_ray.tools.simulation.simulate import Watch, prepared_for
from grpo_ray.tools.simulation.speeds import Lengths, Speeds, lognormal
from grpo_ray.tools.simulation.workers import SimulatedScorer
from grpo_ray.types import StartingModel
from grpo_ray.watch.event_loop import LoopLag
from grpo_ray.watch.memory import ProcessFamily, imports_left_alone
from grpo_ray.watch.run_state import reported


class ScaleActors(ActorGroup):
    """The actors of a run with simulated engines, Learner and Scorers on real Ray."""

    def __init__(
        self, placement: Placement, config: Config, model: StartingModel, run_dir: Path,
        checkpoint: Checkpoint | None, *, speeds: Speeds, lengths: Lengths, per_process: int,
    ) -> None:  # fmt: skip
        """
        Args:
            per_process: Generators in each process.
        """
        self._speeds, self._lengths, self._per_process = speeds, lengths, per_process
        self.processes: dict[int, ActorHandle] = {}
        super().__init__(placement, config, model, run_dir, checkpoint)

    def _kill(self, name: str) -> None:
        """End an actor; a Generator's process, unless another of its Generators was replaced before."""
        if name not in self.generators:
            super()._kill(name)
        elif self.generators[name].handle.process is self.processes[self._place(name)[0]]:
            ray.kill(self.processes.pop(self._place(name)[0]))

    def stop(self, timeout_s: float = 20.0) -> None:
        """End all processes at once: there are no engines to clean up."""
        handles = [client.handle for client in self.by_name().values()]
        others = [handle for handle in handles if not isinstance(handle, LogicalHandle)]
        for handle in (*self.processes.values(), *others):
            ray.kill(handle)

    def memory_bytes(self) -> list[int]:
        """Return the resident memory of each process of engines."""
        sizes = []
        for process in self.processes.values():
            with contextlib.suppress(RayActorError):  # it was killed just now
                sizes.append(cast(int, ray.get(process.memory_bytes.remote(), timeout=30)))
        return sizes

    def _place(self, name: str) -> tuple[int, int]:
        """Return the process's number, and the Generator's place in it."""
        return divmod(int(name.rpartition("-")[2]), self._per_process)

    def _start_generator(self, name: str) -> Client:
        number, index = self._place(name)
        if number not in self.processes:
            self.processes[number] = self._start_process(number)
        handle = LogicalHandle(self.processes[number], index)
        return Client(name, cast(ActorHandle, handle), next(self._numbers))

    def _start_process(self, number: int) -> ActorHandle:
        """Start a process in the bundle of its first Generator."""
        first = number * self._per_process
        names = names_of(self._config)["generator"][first : first + self._per_process]
        seeds = [self._seed_of(each) for each in names]
        hosted = as_actor(Kind(EngineProcess, EngineProcess), f"process-{number}", self._run.logs)
        return hosted.options(**self._placement[names[0]], max_concurrency=10_000).remote(
            names, seeds, self._config, self._speeds, self._lengths, self._version
        )

    def _start_scorer(self, name: str) -> Client:
        kind, given = Kind(SimulatedScorer, SimulatedScorer), (self._config, self._speeds)
        return self._start(kind, name, given, max_concurrency=1000)

    def _start_learner(self) -> Any:
        """Start the Learner on this node: its node does not die."""
        kind = Kind(AccountingLearner, AccountingLearner)
        given = self._config, self._speeds, account_path(self._run.path), self._version
        self.ranks = [self._start(kind, LEARNER, given, is_with_driver=True)]
        return self.ranks[0]


class _Stopwatch:
    """The measurements of the driver, from the moment that training begins to its end."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self.lag = plan, LoopLag()
        self.created_at = time.monotonic()
        self.began_at = self.cpu_s = 0.0
        self.start_s = 0.0

    def drive(self, controller: Controller) -> None:
        """Run the controller to its end, or until the training's time is over."""

        async def main() -> None:
            timing = asyncio.create_task(self._time(controller))
            try:
                await controller.run()
            finally:
                timing.cancel()

        if self._plan.profile is None:
            asyncio.run(main())
            return
        profile = cProfile.Profile()
        try:
            profile.runcall(asyncio.run, main())
        finally:
            profile.dump_stats(self._plan.profile)

    async def _time(self, controller: Controller) -> None:
        while not controller.has_begun:
            await asyncio.sleep(0.01)
        if not self.began_at:
            self.began_at, self.cpu_s = time.monotonic(), time.process_time()
            self.start_s = self.began_at - self.created_at
        self.lag.start()
        await asyncio.sleep(self.began_at + self._plan.training_s - time.monotonic())
        controller.stop()


def measure(plan: Plan, run: RunDirectory) -> Measured:
    """Run to the end of the training's time, on the cluster at RAY_ADDRESS."""
    config = load_config(plan.config, [*plan.overrides])
    speeds, lengths = Speeds.model_validate(plan.speeds), lognormal(plan.length_mean, 1.0)
    prepared = prepared_for(config, speeds)
    run.create(config)
    measured, watch = Measured(), Watch()
    books: list[GroupBook] = []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(session.connected())
        _wait_for_nodes(1 + plan.num_nodes)
        placement = stack.enter_context(session.placed(config))
        measured.nodes_s, stopwatch = time.monotonic() - began, _Stopwatch(plan)

        @contextlib.contextmanager
        def host(*args: Any) -> Iterator[ScaleActors]:
            actors = ScaleActors(placement, *args, speeds=speeds, lengths=lengths, per_process=plan.per_process)
            try:
                yield actors
                measured.process_bytes = actors.memory_bytes()
            finally:
                actors.stop()

        def drive(controller: Controller) -> None:
            books.append(controller.book)
            reporter.follow(controller.live_status)
            stopwatch.drive(controller)
            measured.training_s = time.monotonic() - stopwatch.began_at
            measured.driver_cpu_s = time.process_time() - stopwatch.cpu_s

        running = reported(run, config.algorithm.num_steps, watch)
        with imports_left_alone(), running as reporter:  # as in a run
            train_through_restores(config, prepared, run, reporter, host, drive)
    account = read_account(account_path(run.path), config)
    faults = account.faults(books[-1])
    measured.num_stale, measured.num_lost = faults.num_stale, faults.num_lost
    measured.num_repeated = faults.num_repeated
    measured.num_steps, measured.num_groups = len(account.trained), sum(map(len, account.trained))
    measured.start_s, measured.loop_lag_s = stopwatch.start_s, stopwatch.lag.take()["perf/loop_lag_s"]
    rows = list(read_metrics(run.metrics_path))
    # A short step may end without a probe.
    measured.step_lags_s = [row["perf/loop_lag_s"] for row in rows if "perf/loop_lag_s" in row]
    measured.driver_bytes = ProcessFamily().resident_bytes(with_children=False)
    measured.num_retried = int(sum(row["rollout/retried_groups"] for row in rows))
    if rows:
        measured.num_restarts = int(rows[-1]["recovery/restarts"])
        measured.num_restores = int(rows[-1]["recovery/restores"])
    return measured


def _wait_for_nodes(number: int) -> None:
    """Wait for all nodes, or the first ones would get all processes."""
    while sum(node["Alive"] for node in ray.nodes()) < number:
        time.sleep(0.2)


def main() -> None:
    plan_path, run_path = sys.argv[1:]
    plan, run = Plan(**json.loads(Path(plan_path).read_text())), RunDirectory(Path(run_path))
    measured = measure(plan, run)
    (run.path / "measured.json").write_text(json.dumps(asdict(measured), indent=1))


if __name__ == "__main__":
    main()
