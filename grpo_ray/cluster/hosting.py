"""The actors of a run as Ray actors: where each one runs, and what takes its place."""

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private.internal_api import node_stats
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.actors.generator import Generator
from grpo_ray.actors.learner import Learner
from grpo_ray.actors.scorer import Scorer
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer, buffer_arguments
from grpo_ray.actors.weight_sync import WeightSync, weight_sync_arguments
from grpo_ray.cluster.placement import LEARNER, SCORER, generator_names
from grpo_ray.cluster.remote_actor import Client, Deferred, as_actor, result_of
from grpo_ray.cluster.session import Placement
from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.run.preflight import Prepared
from grpo_ray.telemetry.checkpoint import Checkpoint
from grpo_ray.telemetry.ray_metrics import RayMetrics, are_on
from grpo_ray.telemetry.run_files import RunDirectory


class ServingGroup:
    """Generators and the Scorer: what samples and grades, started at the same time."""

    def __init__(
        self,
        placement: Placement,
        config: Config,
        model_path: str,
        max_model_len: int,
        logs: Path,
        version: int = 0,
    ) -> None:
        """`version` is the one of the weights in `model_path`."""
        self._placement = placement
        self._config, self._model_path, self._max_model_len = config, model_path, max_model_len
        self._logs, self._version = logs, version
        self.generators: dict[str, Client] = {n: self._start_generator(n) for n in generator_names(config)}
        self.scorer = self._start_scorer()

    def by_name(self) -> dict[str, Client]:
        return {**self.generators, self.scorer.name: self.scorer}

    def restart_generator(self, name: str) -> Client:
        """A fresh Generator in the place of `name`, with the weights that the run began with."""
        ray.kill(self.generators[name].handle)
        self.generators[name] = self._start_generator(name)
        return self.generators[name]

    def restart_scorer(self) -> Client:
        ray.kill(self.scorer.handle)
        self.scorer = self._start_scorer()
        return self.scorer

    async def fetch(self, reference: Any) -> Any:
        """What a reference stands for, brought here."""
        return await result_of("driver", reference)

    def put(self, data: Any) -> Any:
        """A reference to `data`, which several actors can be given without a copy for each."""
        return ray.put(data)

    def spilled_bytes(self) -> int:
        """What the cluster's object stores have written to disk so far because their memory was full."""
        total = 0
        for node in ray.nodes():
            if node["Alive"]:
                with contextlib.suppress(grpc.RpcError):  # it is being lost
                    address = node["NodeManagerAddress"], node["NodeManagerPort"]
                    total += node_stats(*address, include_memory_info=False).store_stats.spilled_bytes_total
        return total

    def dump_stacks(self) -> None:
        """Make every actor write its threads' Python stacks into its log, however stuck it is."""
        here = ray.get_runtime_context().get_node_id()
        for name in self.by_name():
            path = self._logs / f"{name}.pid"
            if path.exists():
                node, pid = path.read_text().split()
                if node == here:
                    _send_stack_signal(int(pid))
                else:
                    affinity = NodeAffinitySchedulingStrategy(node, soft=True)
                    ray.remote(_send_stack_signal).options(num_cpus=0, scheduling_strategy=affinity).remote(
                        int(pid)
                    )

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the engines' own processes, then the actors; a Generator that is not up yet is just killed.

        Killing an actor ends its child processes too (Ray sees to it); asking first lets vLLM clean up.
        """
        handles = [client.handle for client in self.generators.values()]
        with contextlib.suppress(Exception):  # one that is dead or hung is killed below all the same
            up, _ = ray.wait([h.take_stats.remote() for h in handles], num_returns=len(handles), timeout=0.5)
            if len(up) == len(handles):
                ray.get([h.shutdown.remote() for h in handles], timeout=timeout_s)
        for client in self.by_name().values():
            ray.kill(client.handle)

    def _start_generator(self, name: str) -> Client:
        config, model_path, max_model_len = self._config, self._model_path, self._max_model_len
        index = int(name.rpartition("-")[2])
        engine = Deferred(lambda: make_engine(config, model_path, max_model_len, index))
        actor = self._host(Generator, name).options(**self._placement.options(name), max_concurrency=10_000)
        return Client(name, actor.remote(name, engine, config.generator.slowdown_s, self._version))

    def _start_scorer(self) -> Client:
        config = self._config
        actor = self._host(Scorer, "scorer", beside=("take_stats",)).options(
            **self._placement.options(SCORER),
            max_concurrency=config.scorer.num_workers,  # groups at a time, so that each worker has an answer
            allow_out_of_order_execution=True,  # a slow group holds no other
        )
        return Client(
            "scorer",
            actor.remote(config.task.rewards, config.algorithm, config.scorer, config.sampling.max_tokens),
        )

    def _host(self, cls: Any, name: str, beside: tuple[str, ...] = ()) -> Any:
        return as_actor(cls, name, self._logs, beside)


class ActorGroup(ServingGroup):
    """Every actor of a run; each has a `ready` method to await."""

    def __init__(
        self,
        placement: Placement,
        config: Config,
        prepared: Prepared,
        run_dir: Path,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._prepared, self._checkpoint = prepared, checkpoint
        self._run = RunDirectory(run_dir)
        self._metrics = RayMetrics(run_dir.name) if are_on() else None
        version = checkpoint.state.step if checkpoint else 0
        model_path = str(checkpoint.model_path) if checkpoint else prepared.model_path
        super().__init__(placement, config, model_path, prepared.max_model_len, self._run.logs, version)
        self.learner = self._start_learner()
        self.buffer = self._start_buffer()
        self.weight_sync = self._start_weight_sync()

    def by_name(self) -> dict[str, Client]:
        others = (self.learner, self.buffer, self.weight_sync)
        return {**super().by_name(), **{client.name: client for client in others}}

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's line, for Ray's metrics."""
        if self._metrics is not None:
            self._metrics.line(step, metrics)

    def show_phase(self, phase: str) -> None:
        """What the run is about from now on, for Ray's metrics."""
        if self._metrics is not None:
            self._metrics.phase(phase)

    def _start_learner(self) -> Client:
        config = self._config
        actor = self._host(Learner, "learner", beside=("write_captured", "take_stats")).options(
            **self._placement.options(LEARNER)
        )
        training = self._checkpoint.training_path if self._checkpoint else None
        ends = self._prepared.end_token_ids
        initial = self._prepared.model_path
        arguments = self._model_path, config, ends, training, self._run.skipped, initial, self._run.profile
        return Client("learner", actor.remote(*arguments))

    def _start_buffer(self) -> Client:
        """The buffer writes the run's rollouts, so it lives where the run directory is."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = self._host(TrajectoryBuffer, "buffer").options(
            num_cpus=0, max_concurrency=10_000, scheduling_strategy=here
        )
        rollouts = self._run.rollouts if self._config.run.save_rollouts else None
        training = self._checkpoint.training_path if self._checkpoint else None
        return Client("buffer", actor.remote(*buffer_arguments(self._config, rollouts, training)))

    def _start_weight_sync(self) -> Client:
        actor = self._host(WeightSync, "weight_sync").options(num_cpus=0, max_concurrency=100)
        clients = list(self.generators.values())
        ledger = self._prepared.ledger
        arguments = weight_sync_arguments(self._config, ledger.num_trained, ledger.num_left, self._version)
        return Client("weight_sync", actor.remote(clients, *arguments))


@contextlib.contextmanager
def running(
    placement: Placement,
    config: Config,
    prepared: Prepared,
    run_dir: Path,
    checkpoint: Checkpoint | None = None,
) -> Iterator[ActorGroup]:
    """The actors of a run, ended however the block is left."""
    actors = ActorGroup(placement, config, prepared, run_dir, checkpoint)
    try:
        yield actors
    finally:
        actors.stop()


@contextlib.contextmanager
def serving(
    placement: Placement, config: Config, model_path: str, max_model_len: int, logs: Path
) -> Iterator[ServingGroup]:
    """Generators with the model, and the Scorer, ended however the block is left."""
    actors = ServingGroup(placement, config, model_path, max_model_len, logs)
    try:
        yield actors
    finally:
        actors.stop()


def _send_stack_signal(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
