"""The actors of a run as Ray actors: the placement of each one, and its replacement."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorClass, ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.cluster.crew import Crew, RankMeeting
from grpo_ray.cluster.placement import (
    LEARNER,
    environment_names,
    generator_names,
    rank_names,
    scorer_names,
    teacher_names,
)
from grpo_ray.cluster.ray_internals import spilled_bytes_of
from grpo_ray.cluster.reaper import KILL_AFTER_S, Process, kill_if_left, send_stack_signal
from grpo_ray.cluster.remote_actor import DEATHS, NOTHING, Client, Deferred, as_actor, last_line, result_of
from grpo_ray.cluster.session import Placement, address_of_node, is_local
from grpo_ray.config import Config
from grpo_ray.config.secrets import values_of
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.core.clients import (
    ActorClient,
    BufferClient,
    EnvironmentClient,
    GeneratorClient,
    LearnerClient,
    ScorerClient,
    TeacherClient,
    WeightSyncClient,
)
from grpo_ray.core.generator import Generator
from grpo_ray.core.learner import Learner
from grpo_ray.core.scorer import Scorer, scorer_arguments
from grpo_ray.core.sync import WeightSync
from grpo_ray.core.teacher import Teacher
from grpo_ray.engines import engine_seed, make_engine, make_teacher_engine
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.errors import RunError
from grpo_ray.learning.ranks import Seat
from grpo_ray.records.checkpoint import Checkpoint
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.transfer.wires import Wires
from grpo_ray.types import Ref, StartingModel, methods_with_bulk
from grpo_ray.watch.ray_metrics import RayMetrics, are_on
from grpo_ray.watch.spilling import SpilledBytes

T = TypeVar("T")


class ServingGroup:
    """Generators, Scorers, Teachers and EnvironmentWorkers: all that sample and judge, started together."""

    def __init__(
        self, placement: Placement, config: Config, model: StartingModel, logs: Path, version: int = 0
    ) -> None:
        """
        Args:
            version: of the weights in `model`.
        """
        self._placement, self._config, self._model = placement, config, model
        self._logs, self._version = logs, version
        self._clients: dict[str, Client] = {}  # each actor's current one, by its name
        self._numbers = itertools.count()  # of processes
        self._ending: list[Thread] = []  # each waits for the process of an actor that was killed
        self._num_starts: Counter[str] = Counter()  # of engines, by their Generator's name
        self._spilled = SpilledBytes(_living_nodes, spilled_bytes_of)
        self.generators = {name: self._start_generator(name) for name in generator_names(config)}
        self.scorers = {name: self._start_scorer(name) for name in scorer_names(config)}
        self.teachers = {name: self._start_teacher(name) for name in teacher_names(config)}
        self.environments = {name: self._start_environment(name) for name in environment_names(config)}

    def by_name(self) -> dict[str, ActorClient]:
        return {**self.generators, **self.scorers, **self.teachers, **self.environments}

    def restart_generator(self, name: str) -> GeneratorClient:
        """Start a fresh Generator in place of `name`, with the weights that the actors started with."""
        self._kill(name)
        self.generators[name] = self._start_generator(name)
        return self.generators[name]

    def restart_worker(self, name: str) -> ActorClient:
        """Start a fresh Scorer, Teacher or EnvironmentWorker in place of `name`."""
        self._kill(name)
        if name in self.teachers:
            self.teachers[name] = self._start_teacher(name)
            return self.teachers[name]
        if name in self.scorers:
            self.scorers[name] = self._start_scorer(name)
            return self.scorers[name]
        self.environments[name] = self._start_environment(name)
        return self.environments[name]

    async def fetch(self, reference: Ref[T]) -> T:
        """Bring the value of a reference into this process."""
        return await result_of("driver", reference)

    def put(self, data: T) -> Ref[T]:
        """Return a reference to `data`, which several actors can be given without a copy for each."""
        return cast("Ref[T]", ray.put(data))

    def spilled_bytes(self) -> int:
        """Return the bytes that object stores have written to disk, by their newest answers; waits for none."""
        return self._spilled.total()

    def dump_stacks(self) -> None:
        """Make every actor write its threads' Python stacks into its log, even if it is stuck.

        Actors without a process to be found are left out: this is a diagnosis, which must break nothing.
        """
        for name in self.by_name():
            self._reach(name, send_stack_signal, send_stack_signal)

    def _reach(self, name: str, here: Callable[[Process], object], there: Callable[[Process], object]) -> None:
        """Call `here` with the actor's process, or `there` on another node that it is on."""
        with contextlib.suppress(OSError, ValueError):  # no file; or an empty one, from a full disk
            node, pid, start_time = (self._logs / f"{name}.pid").read_text().split()
            process = int(pid), start_time
            if node == ray.get_runtime_context().get_node_id():
                here(process)
            else:  # on that node or nowhere: elsewhere the pid is another process's
                affinity = NodeAffinitySchedulingStrategy(node, soft=False)
                task = ray.remote(there)
                task.options(num_cpus=0, scheduling_strategy=affinity).remote(process)

    def _kill(self, name: str) -> None:
        """Kill an actor, and make sure of its process.

        Ray asks the process to end, and gives up if it cannot connect to it: one that is stopped would stay,
        with all its memory.
        """
        ray.kill(self._clients[name].handle)
        self._reach(name, self._kill_later, kill_if_left)

    def _kill_later(self, process: Process) -> None:
        self._ending.append(Thread(target=kill_if_left, args=(process,), daemon=True))
        self._ending[-1].start()

    def _place_of(self, name: str) -> str:
        """Return the address of an actor's node; empty if its process was not up yet."""
        with contextlib.suppress(OSError, IndexError):
            node = (self._logs / f"{name}.pid").read_text().split()[0]
            return next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), "")
        return ""

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the engines' own processes, then the actors; one that is not up yet is just killed.

        Ray also ends the child processes of an actor that is killed; asking first lets vLLM, and a worker with
        a temporary folder, clean up.
        """
        asked = (*self.generators, *self.teachers, *self.environments)
        handles = [self._clients[name].handle for name in asked]
        with contextlib.suppress(Exception):  # one that is dead or hung is killed below all the same
            probes = {handle.take_stats.remote(): handle for handle in handles}
            up, _ = ray.wait(list(probes), num_returns=len(probes), timeout=0.5)
            ray.get([probes[probe].shutdown.remote() for probe in up], timeout=timeout_s)
        for name in self._clients:
            self._kill(name)
        for thread in self._ending:
            thread.join(2 * KILL_AFTER_S)

    def _start_generator(self, name: str) -> GeneratorClient:
        config, model = self._config, self._model
        seed = engine_seed(config.run.seed, name, self._version, self._num_starts[name])
        self._num_starts[name] += 1
        engine = Deferred(lambda: make_engine(config, model.path, model.max_model_len, seed))
        actor = self._host(Generator, name).options(**self._placement.options(name), max_concurrency=10_000)
        handle = actor.remote(name, engine, config.generator.slowdown_s, self._version)
        return cast(GeneratorClient, self._client(Generator, name, handle))

    def _start_scorer(self, name: str) -> ScorerClient:
        config = self._config
        actor = self._host(Scorer, name, beside={"take_stats": 1}).options(
            **self._placement.options(name),
            max_concurrency=config.scorer.num_workers,  # groups at a time, so that each worker has an answer
            allow_out_of_order_execution=True,  # a slow group delays no other
        )
        handle = actor.remote(*scorer_arguments(config))
        return cast(ScorerClient, self._client(Scorer, name, handle))

    def _start_teacher(self, name: str) -> TeacherClient:
        config, model = self._config, self._model
        engine = Deferred(lambda: make_teacher_engine(config, model))
        actor = self._host(Teacher, name).options(**self._placement.options(name), max_concurrency=10_000)
        return cast(TeacherClient, self._client(Teacher, name, actor.remote(name, engine)))

    def _start_environment(self, name: str) -> EnvironmentClient:
        actor = self._host(EnvironmentWorker, name)
        settings = self._config.episodes
        handle = actor.options(**self._placement.options(name), max_concurrency=10_000).remote(
            name, self._config, self._model, settings.confined, values_of(settings.secrets)
        )
        return cast(EnvironmentClient, self._client(EnvironmentWorker, name, handle))

    def _host(self, cls: type, name: str, beside: Mapping[str, int] = NOTHING) -> ActorClass[Any]:
        return as_actor(cls, name, self._logs, beside)

    def _client(self, cls: type, name: str, handle: ActorHandle) -> Client:
        self._clients[name] = Client(name, handle, methods_with_bulk(cls), next(self._numbers))
        return self._clients[name]


class ActorGroup(ServingGroup):
    """Every actor of a run."""

    def __init__(
        self,
        placement: Placement,
        config: Config,
        model: StartingModel,
        run_dir: Path,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """
        Args:
            model: the one that the run began with; a checkpoint's weights take precedence, or its adapter is
                put on it.
        """
        self._initial_path = model.path
        self._checkpoint = checkpoint
        self._run = RunDirectory(run_dir)
        self._metrics = RayMetrics(run_dir.name) if are_on() else None
        version = 0
        if checkpoint is not None:
            version = checkpoint.state.step
            if config.model.adapter is None:
                model = StartingModel(str(checkpoint.model_path), model.end_token_ids, model.max_model_len)
        super().__init__(placement, config, model, self._run.logs, version)
        self.learner = self._start_learner()
        self.buffer = self._start_buffer()
        self.weight_sync = self._start_weight_sync()

    def by_name(self) -> dict[str, ActorClient]:
        others: list[ActorClient] = [*self.ranks, self.buffer, self.weight_sync]
        return {**super().by_name(), **{client.name: client for client in others}}

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export a step's metrics, for Ray's dashboard."""
        if self._metrics is not None:
            self._metrics.line(step, metrics)

    def show_phase(self, phase: str) -> None:
        """Export the run's current phase, for Ray's dashboard."""
        if self._metrics is not None:
            self._metrics.phase(phase)

    @property
    def _training_path(self) -> Path | None:
        return self._checkpoint.training_path if self._checkpoint else None

    def _start_learner(self) -> LearnerClient:
        names = rank_names(self._config)
        if len(names) == 1:
            self.ranks = [self._start_rank(LEARNER)]
            return cast(LearnerClient, self.ranks[0])
        self._meeting = RankMeeting(self._config, address_of_node(is_local()))  # open as long as the ranks
        self.ranks = [self._start_rank(name, self._meeting.seat(rank)) for rank, name in enumerate(names)]
        limit_s = self._config.learner.collective_timeout_s
        return cast(LearnerClient, Crew(LEARNER, self.ranks, self._place_of, limit_s))

    def _start_rank(self, name: str, seat: Seat | None = None) -> Client:
        actor = self._host(Learner, name, beside=self._beside_training())
        handle = actor.options(**self._placement.options(name)).remote(
            self._model.path,
            self._config,
            self._model.end_token_ids,
            self._training_path,
            self._run.skipped,
            self._initial_path,
            self._run.profile,
            seat,
            Deferred(partial(address_of_node, is_local())),
        )
        return self._client(Learner, name, handle)

    def _beside_training(self) -> dict[str, int]:
        """Return the Learner's methods that run beside its training, and their numbers of threads."""
        alone = ["write_captured", "take_stats", "work_done"]
        if not self._config.weight_sync.wire_backend:
            return dict.fromkeys(alone, 1)
        each = 8 * self._config.generator.num_generators  # some may still wait for predecessors
        short = dict.fromkeys([*alone, "open_wire", "drop_wire", "release"], 1)
        return {**short, "join_wire": each, "send": each}

    def _start_buffer(self) -> BufferClient:
        """Start the buffer on this node, because it writes the run's rollouts into the run directory."""
        actor = self._host(TrajectoryBuffer, "buffer").options(**on_this_node(), max_concurrency=10_000)
        rollouts = self._run.rollouts if self._config.run.save_rollouts else None
        handle = actor.remote(self._config, rollouts, self._training_path)
        return cast(BufferClient, self._client(TrajectoryBuffer, "buffer", handle))

    def _start_weight_sync(self) -> WeightSyncClient:
        """Start WeightSync on this node: the death of another would take the run back to a checkpoint."""
        actor = self._host(WeightSync, "weight_sync").options(**on_this_node(), max_concurrency=100)
        timeout_s = self._config.weight_sync.phase_timeout_s
        generators = list(self.generators.values())
        handle = actor.remote(generators, timeout_s, self._version, self._wires())
        return cast(WeightSyncClient, self._client(WeightSync, "weight_sync", handle))

    def _wires(self) -> Wires | None:
        backend = self._config.weight_sync.wire_backend
        return None if backend is None else Wires(self.ranks[0], "switch" if backend == "nccl" else "stage")


@contextlib.contextmanager
def running(
    placement: Placement,
    config: Config,
    model: StartingModel,
    run_dir: Path,
    checkpoint: Checkpoint | None = None,
) -> Iterator[ActorGroup]:
    """Start the actors of a run, and end them however the block is left."""
    actors = ActorGroup(placement, config, model, run_dir, checkpoint)
    try:
        yield actors
    finally:
        actors.stop()


@contextlib.contextmanager
def serving(placement: Placement, config: Config, model: StartingModel, logs: Path) -> Iterator[ServingGroup]:
    """Start Generators with the model and the actors beside them, and end all however the block is left."""
    actors = ServingGroup(placement, config, model, logs)
    try:
        yield actors
    finally:
        actors.stop()


@contextlib.contextmanager
def learning(
    placement: Placement, config: Config, model: StartingModel, run_dir: Path
) -> Iterator[Callable[..., Any]]:
    """Start a Learner alone, and yield a function that calls its methods; end it however the block is left."""
    logs = RunDirectory(run_dir).logs
    actor = as_actor(Learner, LEARNER, logs).options(**placement.options(LEARNER))
    handle = actor.remote(model.path, config, model.end_token_ids)

    def call(method: str, *args: object) -> Any:
        try:
            return ray.get(getattr(handle, method).remote(*args))
        except DEATHS as error:
            raise RunError(
                f"the Learner ended: {last_line(error)}\nIts output is in {logs}/learner.log"
            ) from error

    try:
        yield call
    finally:
        ray.kill(handle)


def on_this_node() -> dict[str, Any]:
    """Return the options of an actor that reserves nothing, and lives and dies with the driver's node."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return {"num_cpus": 0, "scheduling_strategy": here}


def _living_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]
