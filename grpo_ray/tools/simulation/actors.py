"""The actors of a simulated run, as objects of this process that are called like Ray actors."""

import asyncio
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_ray.actors.generator import Generator as GeneratorActor
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer, buffer_arguments
from grpo_ray.actors.weight_sync import WeightSync, admission_of
from grpo_ray.cluster.placement import environment_names, generator_names, scorer_names, teacher_names
from grpo_ray.config import Config
from grpo_ray.engines import engine_seed
from grpo_ray.errors import ActorDied
from grpo_ray.telemetry.checkpoint import Checkpoint
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.tools.simulation.account import Account
from grpo_ray.tools.simulation.cores import Cores, cores_of
from grpo_ray.tools.simulation.cpu_meter import CpuMeter
from grpo_ray.tools.simulation.engine import SimulatedEngine
from grpo_ray.tools.simulation.environments import SimulatedEnvironmentWorker
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.tools.simulation.workers import SimulatedLearner, SimulatedScorer, SimulatedTeacher
from grpo_ray.types import StartingModel, methods_with_bulk

Trace = Callable[[str], object]


class Answer:
    """The future result of a call, which like Ray's begins at once and need not be awaited."""

    def __init__(self, client: "SimulatedClient", task: "asyncio.Task[Any]") -> None:
        self._client, self._task = client, task

    def __await__(self) -> Generator[Any, Any, Any]:
        try:
            return (yield from self._task.__await__())
        except asyncio.CancelledError:
            if self._task.cancelled() and self._client.death is not None and not _is_cancelled():
                raise self._client.death from None
            raise


@dataclass(frozen=True)
class Part:
    """One of the two results of a call that returns bulk and facts; the bulk is passed on as a reference."""

    answer: Answer
    index: int

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self.answer.__await__())[self.index]


@functools.cache
def _bulk_methods(actor_class: type) -> frozenset[str]:
    return methods_with_bulk(actor_class)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Dispatch:
    """The driver's own work for each group that it gives to a Generator, one after another."""

    def __init__(self, cores: Cores, work_s: float) -> None:
        self._cores, self._work_s = cores, work_s
        self._turn = asyncio.Lock()

    async def __call__(self) -> None:
        async with self._turn:
            await self._cores.work(self._work_s)


class SimulatedClient:
    """A client like `remote_actor.Client`, of an asynchronous object in this process, which can die."""

    def __init__(
        self,
        name: str,
        actor: Any,
        trace: Trace | None = None,
        meter: CpuMeter | None = None,
        dispatch: Dispatch | None = None,
    ) -> None:
        """
        Args:
            trace: receives a line per call and per death.
            dispatch: what a call of `generate` waits for; default: nothing.
        """
        self.name, self._actor, self._trace, self._meter = name, actor, trace, meter
        self._dispatch = dispatch
        self.death: ActorDied | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._bulk_methods = _bulk_methods(actor.__class__)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: self._call(method, args)

    def die(self, reason: str) -> None:
        """End the actor as if its process had died: its open calls fail, and so do all later ones."""
        self.death = ActorDied(self.name, reason)
        self._note("died")
        for task in list(self._calls):
            task.cancel()

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        if self._meter is None:
            return self._begin(method, args)
        begun = self._meter.begin()
        try:
            return self._begin(method, args)
        finally:
            self._meter.end("client", begun)

    def _begin(self, method: str, args: Sequence[Any]) -> Any:
        self._note(method)
        work = self._work(method, args)  # in a context of its own, as in another process
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._calls.add(task)
        task.add_done_callback(self._ended)
        answer = Answer(self, task)
        return (Part(answer, 0), Part(answer, 1)) if method in self._bulk_methods else answer

    async def _work(self, method: str, args: Sequence[Any]) -> Any:
        work = self._serve(method, args)
        return await (work if self._meter is None else self._meter.metered("client", work))

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        if self.death is not None:
            raise self.death
        values = [await arg if isinstance(arg, Answer | Part) else arg for arg in args]
        if self._dispatch is not None and method == "generate":
            await self._dispatch()
        work = getattr(self._actor, method)(*values)
        return await (work if self._meter is None else self._meter.metered(self.name, work))

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # or asyncio reports one that is never awaited

    def _note(self, what: str) -> None:
        if self._trace is not None:
            self._trace(f"{asyncio.get_running_loop().time():.6f} {self.name} {what}\n")


class SimulatedActors:
    """The counterpart of `hosting.ActorGroup`; call it while the loop runs, or before."""

    def __init__(
        self,
        config: Config,
        start: StartingModel,
        run_dir: Path,
        checkpoint: Checkpoint | None,
        *,
        speeds: Speeds,
        lengths: Lengths,
        account: Account,
        trace: Trace | None = None,
        meter: CpuMeter | None = None,
    ) -> None:
        self._config, self._speeds, self._lengths = config, speeds, lengths
        self._trace, self._meter = trace, meter
        self._cores = cores_of(speeds.cores)
        self._dispatch = Dispatch(self._cores, speeds.dispatch_s) if speeds.dispatch_s else None
        self._version = checkpoint.state.step if checkpoint else 0
        self._num_starts: dict[str, int] = {}
        training = checkpoint.training_path if checkpoint else None
        rollouts = RunDirectory(run_dir).rollouts if config.run.save_rollouts else None
        self.generators: dict[str, Any] = {name: self._new_generator(name) for name in generator_names(config)}
        self.scorers: dict[str, Any] = {name: self._new_scorer(name) for name in scorer_names(config)}
        self.environments: dict[str, Any] = {n: self._new_environment(n) for n in environment_names(config)}
        self.teachers: dict[str, Any] = {name: self._new_teacher(name) for name in teacher_names(config)}
        learner = SimulatedLearner(config, speeds, account, self._version, self._cores)
        self.learner: Any = self._client("learner", learner)
        self.buffer: Any = self._client(
            "buffer", TrajectoryBuffer(*buffer_arguments(config, rollouts, training))
        )
        clients = list(self.generators.values())
        timeout_s = config.weight_sync.phase_timeout_s
        self.weight_sync: Any = self._client(
            "weight_sync", WeightSync(clients, admission_of(config), timeout_s, self._version)
        )

    def by_name(self) -> dict[str, Any]:
        others = (self.learner, self.buffer, self.weight_sync)
        by_name = {client.name: client for client in others}
        return {**self.generators, **self.scorers, **self.teachers, **self.environments, **by_name}

    def _client(self, name: str, actor: Any) -> SimulatedClient:
        return SimulatedClient(name, actor, self._trace, self._meter, self._dispatch)

    def _new_generator(self, name: str) -> SimulatedClient:
        num_starts = self._count_start(name)
        seed = engine_seed(self._config.run.seed, name, self._version, num_starts)
        recompute_kv, max_num_seqs = self._config.weight_sync.recompute_kv, self._config.generator.max_num_seqs
        engine = SimulatedEngine(self._speeds, self._lengths, max_num_seqs, seed, recompute_kv, self._cores)
        if self._meter is not None:
            engine.on_timer = self._meter.timer(name, engine.on_timer)
        return self._client(
            name, GeneratorActor(name, engine, self._config.generator.slowdown_s, self._version)
        )

    def _count_start(self, name: str) -> int:
        """Return the number of earlier starts of an actor, each of which has a life of its own."""
        num_starts = self._num_starts.get(name, 0)
        self._num_starts[name] = num_starts + 1
        return num_starts

    def _new_scorer(self, name: str) -> SimulatedClient:
        return self._client(name, SimulatedScorer(self._config, self._speeds, self._cores))

    def _new_teacher(self, name: str) -> SimulatedClient:
        return self._client(name, SimulatedTeacher(self._speeds, self._cores))

    def _new_environment(self, name: str) -> SimulatedClient:
        worker = SimulatedEnvironmentWorker(name, self._config, self._speeds, self._count_start(name))
        client = self._client(name, worker)
        worker.on_death = client.die
        return client

    def restart_generator(self, name: str) -> Any:
        self.generators[name].die("it was replaced")
        self.generators[name] = self._new_generator(name)
        return self.generators[name]

    def restart_worker(self, name: str) -> Any:
        kinds: tuple[tuple[dict[str, Any], Callable[[str], SimulatedClient]], ...] = (
            (self.scorers, self._new_scorer),
            (self.teachers, self._new_teacher),
            (self.environments, self._new_environment),
        )
        clients, make = next(kind for kind in kinds if name in kind[0])
        clients[name].die("it was replaced")
        clients[name] = make(name)
        return clients[name]

    async def fetch(self, reference: Any) -> Any:
        return await reference

    def spilled_bytes(self) -> int:
        return 0

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def show_phase(self, phase: str) -> None: ...
    def dump_stacks(self) -> None: ...
