"""The actors of a run in this process, called like Ray actors, for whole runs without Ray.

`die` makes an actor behave as if its process had died, so that a test can choose the exact moment.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_ray.actors.generator import Generator
from grpo_ray.actors.learner import Learner
from grpo_ray.actors.scorer import Scorer, scorer_arguments
from grpo_ray.actors.teacher import Teacher
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer, buffer_arguments
from grpo_ray.actors.weight_sync import WeightSync, admission_of
from grpo_ray.cluster.placement import environment_names, scorer_names, teacher_names
from grpo_ray.config import Config
from grpo_ray.engines import make_engine, make_teacher_engine
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.errors import ActorDied
from grpo_ray.telemetry.checkpoint import Checkpoint
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.transfer.wires import SendingLearner, Wires
from grpo_ray.types import StartingModel, methods_with_bulk

BESIDE = frozenset(name for name in vars(SendingLearner) if not name.startswith("_"))  # in threads, as in Ray


class LocalClient:
    """A client like `remote_actor.Client`, but of an object in this process."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.name = name
        self._build = build
        self._actor: Any = None
        self._dead = asyncio.Event()
        self._turn = asyncio.Lock()  # a synchronous actor's calls run one at a time, in order

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any) -> Any:
            answer = _quiet(self.call(method, args))
            if method not in methods_with_bulk(type(self.actor)):
                return answer
            return _quiet(_item(answer, 0)), _quiet(_item(answer, 1))

        return call

    @property
    def actor(self) -> Any:
        if self._actor is None:
            self._actor = self._build()
        return self._actor

    def die(self) -> None:
        self._dead.set()

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        work = asyncio.ensure_future(self._work(method, args))
        dying = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({work, dying}, return_when=asyncio.FIRST_COMPLETED)
            if dying.done():
                raise ActorDied(self.name, "the test ended it")
            return work.result()
        finally:
            work.cancel()
            dying.cancel()

    async def _work(self, method: str, args: tuple[Any, ...]) -> Any:
        args = tuple([await arg if isinstance(arg, asyncio.Future) else arg for arg in args])
        args = tuple(  # a boxed reference
            [tuple([await a for a in arg]) if _holds_futures(arg) else arg for arg in args]
        )
        function = getattr(self.actor, method)
        if method in BESIDE:
            return await asyncio.to_thread(function, *args)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        async with self._turn:
            await asyncio.sleep(0)
            return function(*args)


def _holds_futures(argument: Any) -> bool:
    return isinstance(argument, tuple) and any(isinstance(item, asyncio.Future) for item in argument)


def _quiet(work: Any) -> "asyncio.Future[Any]":
    """Return the work as a future without asyncio's warning if its error is never retrieved."""
    future = asyncio.ensure_future(work)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def _item(both: Awaitable[Any], place: int) -> Any:
    return (await asyncio.shield(both))[place]


class LocalActors:
    """The counterpart of `hosting.ActorGroup` in this process."""

    def __init__(
        self, config: Config, start: StartingModel, run_dir: Path, checkpoint: Checkpoint | None = None
    ) -> None:
        self._config = config
        run = RunDirectory(run_dir)
        model = str(checkpoint.model_path) if checkpoint and config.model.adapter is None else start.path
        version = checkpoint.state.step if checkpoint else 0
        training = checkpoint.training_path if checkpoint else None

        def generator(name: str) -> Generator:
            engine = make_engine(config, model, start.max_model_len, config.run.seed)
            return Generator(name, engine, config.generator.slowdown_s, version)

        self._generator = generator
        names = [f"generator-{index}" for index in range(config.generator.num_generators)]
        self.generators = {name: self._new_generator(name) for name in names}
        self.scorers = {name: self._new_scorer(name) for name in scorer_names(config)}
        self._start = start
        self.teachers = {name: self._new_teacher(name) for name in teacher_names(config)}
        self.environments = {name: self._new_environment(name) for name in environment_names(config)}
        self.learner = LocalClient(
            "learner",
            lambda: Learner(model, config, start.end_token_ids, training, run.skipped, start.path, run.profile),
        )
        self.buffer = LocalClient(
            "buffer", lambda: TrajectoryBuffer(*buffer_arguments(config, run.rollouts, training))
        )
        clients: list[Any] = list(self.generators.values())
        timeout_s = config.weight_sync.phase_timeout_s
        wires = Wires(self.learner, "stage") if config.weight_sync.wire_backend else None
        self.weight_sync = LocalClient(
            "weight_sync", lambda: WeightSync(clients, admission_of(config), timeout_s, version, wires)
        )
        self.num_stack_dumps = 0

    def by_name(self) -> dict[str, LocalClient]:
        others = (self.learner, self.buffer, self.weight_sync)
        return {
            **self.generators,
            **self.scorers,
            **self.teachers,
            **self.environments,
            **{client.name: client for client in others},
        }

    def _new_generator(self, name: str) -> LocalClient:
        return LocalClient(name, lambda: self._generator(name))

    def _new_scorer(self, name: str) -> LocalClient:
        config = self._config
        return LocalClient(name, lambda: Scorer(*scorer_arguments(config)))

    def restart_generator(self, name: str) -> LocalClient:
        self.generators[name].die()
        self.generators[name] = self._new_generator(name)
        return self.generators[name]

    def _new_teacher(self, name: str) -> LocalClient:
        return LocalClient(name, lambda: Teacher(name, make_teacher_engine(self._config, self._start)))

    def _new_environment(self, name: str) -> LocalClient:
        return LocalClient(name, lambda: EnvironmentWorker(name, self._config, self._start))

    def restart_worker(self, name: str) -> LocalClient:
        self.by_name()[name].die()
        if name in self.scorers:
            self.scorers[name] = self._new_scorer(name)
        elif name in self.teachers:
            self.teachers[name] = self._new_teacher(name)
        else:
            self.environments[name] = self._new_environment(name)
        return self.by_name()[name]

    async def fetch(self, reference: Any) -> Any:
        return await reference

    def spilled_bytes(self) -> int:
        return 0

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def show_phase(self, phase: str) -> None: ...

    def dump_stacks(self) -> None:
        self.num_stack_dumps += 1
