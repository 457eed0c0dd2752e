"""The actors of a run on real Ray with simulated engines, several Generators in each process.

Controller, producer, buffer, WeightSync, placement and recovery are the run's own.
"""

import contextlib
from pathlib import Path
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray_scale_processes import AccountingLearner, EngineProcess, LogicalHandle, account_path

from grpo_ray.cluster.hosting import ActorGroup, on_this_node
from grpo_ray.cluster.placement import LEARNER, generator_names
from grpo_ray.cluster.session import Placement
from grpo_ray.config import Config
from grpo_ray.core.clients import GeneratorClient, LearnerClient, ScorerClient
from grpo_ray.core.generator import Generator
from grpo_ray.engines import engine_seed
from grpo_ray.records.checkpoint import Checkpoint
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.tools.simulation.workers import SimulatedScorer
from grpo_ray.types import StartingModel


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

    def restart_generator(self, name: str) -> GeneratorClient:
        """Start a process in place of the Generator's, unless another of its Generators has done so."""
        number = self._place(name)[0]
        handle = self._clients[name].handle
        if handle.process is self.processes[number]:
            ray.kill(self.processes.pop(number))
        self.generators[name] = self._start_generator(name)
        return self.generators[name]

    def stop(self, timeout_s: float = 20.0) -> None:
        """End all processes at once: there are no engines to clean up."""
        handles = [client.handle for client in self._clients.values()]
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

    def _start_generator(self, name: str) -> GeneratorClient:
        number, index = self._place(name)
        if number not in self.processes:
            self.processes[number] = self._start_process(number)
        handle = LogicalHandle(self.processes[number], index)
        return cast(GeneratorClient, self._client(Generator, name, cast(ActorHandle, handle)))

    def _start_process(self, number: int) -> ActorHandle:
        """Start a process in the bundle of its first Generator."""
        first = number * self._per_process
        names = generator_names(self._config)[first : first + self._per_process]
        seeds = [
            engine_seed(self._config.run.seed, each, self._version, self._num_starts[each]) for each in names
        ]
        self._num_starts.update(names)
        hosted = self._host(EngineProcess, f"process-{number}")
        return hosted.options(**self._placement.options(names[0]), max_concurrency=10_000).remote(
            names, seeds, self._config, self._speeds, self._lengths, self._version
        )

    def _start_scorer(self, name: str) -> ScorerClient:
        hosted = self._host(SimulatedScorer, name).options(
            **self._placement.options(name), max_concurrency=1000
        )
        handle = hosted.remote(self._config, self._speeds)
        return cast(ScorerClient, self._client(SimulatedScorer, name, handle))

    def _start_learner(self) -> LearnerClient:
        """Start the Learner on this node: its node does not die."""
        hosted = self._host(AccountingLearner, LEARNER)
        handle = hosted.options(**on_this_node(), max_concurrency=100).remote(
            self._config, self._speeds, account_path(self._run.path), self._version
        )
        self.ranks = [self._client(AccountingLearner, LEARNER, handle)]
        return cast(LearnerClient, self.ranks[0])
