"""The actors of a run in this process, called as Ray actors are: whole runs without Ray, in a second.

`die` makes an actor behave as one whose process is gone, so that deaths can be put exactly where they hurt.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_ray.actors.generator import Generator
from grpo_ray.actors.learner import Learner
from grpo_ray.actors.scorer import Scorer
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer, buffer_arguments
from grpo_ray.actors.weight_sync import WeightSync, weight_sync_arguments
from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.errors import ActorDied
from grpo_ray.run.preflight import Prepared
from grpo_ray.telemetry.checkpoint import Checkpoint
from grpo_ray.telemetry.run_files import RunDirectory


class LocalClient:
    """As `remote_actor.Client`, over an object in this process."""

    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.name = name
        self._build = build
        self._actor: Any = None
        self._dead = asyncio.Event()
        self._turn = asyncio.Lock()  # a synchronous actor's calls run one at a time, in order

    def __getattr__(self, method: str) -> "_LocalMethod":
        if method.startswith("_"):
            raise AttributeError(method)
        return _LocalMethod(self, method)

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
        args = tuple(
            [[await a for a in arg] if _holds_futures(arg) else arg for arg in args]
        )  # a boxed reference
        function = getattr(self.actor, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        async with self._turn:
            await asyncio.sleep(0)
            return function(*args)


def _holds_futures(argument: Any) -> bool:
    return isinstance(argument, list) and any(isinstance(item, asyncio.Future) for item in argument)


class _LocalMethod:
    def __init__(self, client: LocalClient, method: str) -> None:
        self._client, self._method = client, method

    def __call__(self, *args: Any) -> Awaitable[Any]:
        return self.reference(*args)

    def split(self, *args: Any) -> tuple[Any, Awaitable[Any]]:
        both = self.reference(*args)
        return _quiet(_item(both, 0)), _quiet(_item(both, 1))

    def reference(self, *args: Any) -> Any:
        return _quiet(self._client.call(self._method, args))


def _quiet(work: Any) -> "asyncio.Future[Any]":
    """As a reference whose error nobody asks for."""
    future = asyncio.ensure_future(work)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def _item(both: Awaitable[Any], place: int) -> Any:
    return (await asyncio.shield(both))[place]


class LocalActors:
    """As `hosting.ActorGroup`."""

    def __init__(
        self, config: Config, prepared: Prepared, run_dir: Path, checkpoint: Checkpoint | None = None
    ) -> None:
        self._config, self._prepared, self._checkpoint = config, prepared, checkpoint
        run = RunDirectory(run_dir)
        model = str(checkpoint.model_path) if checkpoint else prepared.model_path
        version = checkpoint.state.step if checkpoint else 0
        training = checkpoint.training_path if checkpoint else None

        def generator(name: str) -> Generator:
            engine = make_engine(config, model, prepared.max_model_len, int(name.rpartition("-")[2]))
            return Generator(name, engine, config.generator.slowdown_s, version)

        self._generator = generator
        names = [f"generator-{index}" for index in range(config.generator.num_generators)]
        self.generators = {name: self._new_generator(name) for name in names}
        self.scorer = self._new_scorer()
        self.learner = LocalClient(
            "learner",
            lambda: Learner(
                model, config, prepared.end_token_ids, training, run.skipped, prepared.model_path, run.profile
            ),
        )
        self.buffer = LocalClient(
            "buffer", lambda: TrajectoryBuffer(*buffer_arguments(config, run.rollouts, training))
        )
        clients, ledger = list(self.generators.values()), prepared.ledger
        arguments = weight_sync_arguments(config, ledger.num_trained, ledger.num_left, version)
        self.weight_sync = LocalClient("weight_sync", lambda: WeightSync(clients, *arguments))
        self.num_stack_dumps = 0

    def by_name(self) -> dict[str, LocalClient]:
        others = (self.learner, self.scorer, self.buffer, self.weight_sync)
        return {**self.generators, **{client.name: client for client in others}}

    def _new_generator(self, name: str) -> LocalClient:
        return LocalClient(name, lambda: self._generator(name))

    def _new_scorer(self) -> LocalClient:
        config = self._config
        return LocalClient(
            "scorer",
            lambda: Scorer(config.task.rewards, config.algorithm, config.scorer, config.sampling.max_tokens),
        )

    def restart_generator(self, name: str) -> LocalClient:
        self.generators[name].die()
        self.generators[name] = self._new_generator(name)
        return self.generators[name]

    def restart_scorer(self) -> LocalClient:
        self.scorer.die()
        self.scorer = self._new_scorer()
        return self.scorer

    async def fetch(self, reference: Any) -> Any:
        return await reference

    def spilled_bytes(self) -> int:
        return 0

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def show_phase(self, phase: str) -> None: ...

    def dump_stacks(self) -> None:
        self.num_stack_dumps += 1
