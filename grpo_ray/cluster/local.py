"""The actors of a run in this process, called like Ray actors: `train --local`, simulations, and tests.

Nothing here needs Ray, and a simulation does not import the actors that compute. An object passes from actor to
actor without a copy. A synchronous method runs in a thread, which leaves the loop free for samples and signals.
"""

import asyncio
import contextlib
import faulthandler
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import Context
from functools import cached_property, partial
from pathlib import Path
from threading import Thread
from typing import Any

from grpo_ray.cluster.hosts import ServingHost, TrainingHost
from grpo_ray.cluster.kinds import NOTHING, Answer, BaseClient, Kind
from grpo_ray.config import Config
from grpo_ray.core.clients import WITH_BULK
from grpo_ray.errors import ActorDied, RunError, shown_plainly
from grpo_ray.types import StartingModel


def check_local(config: Config) -> None:
    """Refuse what one process cannot run; raises RunError with each field and the value that it needs."""
    teacher = config.distillation.teacher is not None
    needed = {
        "generator.engine=torch": config.generator.engine == "vllm",
        "distillation.engine=torch": teacher and config.distillation.engine == "vllm",
        "generator.num_gpus=0": config.generator.num_gpus > 0,
        "learner.num_gpus=0": config.learner.num_gpus > 0,
        "distillation.num_gpus=0": teacher and config.distillation.num_gpus > 0,
        "learner.num_ranks=1": config.learner.num_ranks > 1,
        "generator.cpu_cores=null": config.generator.cpu_cores is not None,
        "learner.cpu_cores=null": config.learner.cpu_cores is not None,
        "weight_sync.transport=object_store": config.weight_sync.transport != "object_store",
        "episodes.confined=false": config.episodes.confined and bool(config.episode_tasks),
    }
    if any(needed.values()):
        changes = " ".join(change for change, is_needed in needed.items() if is_needed)
        raise RunError(f"--local runs all actors in one process, on its CPU; add {changes}, or omit --local")


class LocalClient(BaseClient):
    """A client like `remote_actor.Client`, of an object in this process, which can die."""

    def __init__(
        self, name: str, build: Callable[[], Any], number: int = 0, beside: Collection[str] = ()
    ) -> None:
        """
        Args:
            build: makes the object, at the first call.
            number: of the actor's process, if it had one, among all that the run has started.
            beside: its synchronous methods that run in parallel with its others.
        """
        self.name, self.number, self._build, self._beside = name, number, build, beside
        self.death: ActorDied | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._turn = asyncio.Lock()  # a synchronous actor's calls run one at a time, in order

    @cached_property
    def actor(self) -> Any:
        with shown_plainly():  # a Learner refuses a model that it cannot train, for example
            return self._build()

    def die(self, reason: str = "it was ended") -> None:
        """End the actor as if its process had died: its open calls fail, and so do all later ones."""
        self.death = ActorDied(self.name, reason)
        for task in list(self._calls):
            task.cancel()

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        work = self._work(method, args)  # in a context of its own, as in another process
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio reports it
        if method in WITH_BULK:
            return Answer(partial(self._part, task, 0)), Answer(partial(self._part, task, 1))
        return Answer(partial(self._result, task))

    async def _part(self, task: "asyncio.Task[Any]", part: int) -> Any:
        return (await self._result(task))[part]

    async def _result(self, task: "asyncio.Task[Any]") -> Any:
        try:
            return await task
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            is_cancelled = waiting is not None and waiting.cancelling() > 0
            if task.cancelled() and self.death is not None and not is_cancelled:
                raise self.death from None
            raise

    async def _work(self, method: str, args: Sequence[Any]) -> Any:
        if self.death is not None:
            raise self.death
        values = [await arg if isinstance(arg, Answer | asyncio.Future) else arg for arg in args]
        return await self._serve(method, values)

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        function = getattr(self.actor, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        if method in self._beside:
            return await asyncio.to_thread(function, *args)
        async with self._turn:
            return await asyncio.to_thread(function, *args)


@contextlib.contextmanager
def threads_kept() -> Iterator[None]:
    """Give torch back the caller's number of threads, of which the actors of this process take fewer."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LocalServing(ServingHost):
    """The counterpart of `hosting.ServingGroup` in this process."""

    def _start(
        self, kind: Kind, name: str, given: Sequence[Any], beside: Mapping[str, int] = NOTHING, **_: Any
    ) -> LocalClient:
        return self._client(name, partial(kind.make, given), beside)

    def _client(self, name: str, build: Callable[[], Any], beside: Collection[str] = ()) -> LocalClient:
        return LocalClient(name, build, next(self._numbers), beside)

    def _kill(self, name: str) -> None:
        self.by_name()[name].die("it was replaced")
        if name in self.scorers:  # in a thread, as it may be stuck
            Thread(target=self._end_grader, args=[self.scorers[name]], daemon=True).start()

    async def fetch(self, reference: Any) -> Any:
        return await reference

    def put(self, data: Any) -> Any:
        return data

    def dump_stacks(self) -> None:
        """Append all threads' Python stacks to logs/threads.log."""
        with contextlib.suppress(OSError):
            self._run.logs.mkdir(exist_ok=True)
            with (self._run.logs / "threads.log").open("a") as file:
                faulthandler.dump_traceback(file, all_threads=True)

    def stop(self) -> None:
        """End the processes of the graders."""
        for scorer in self.scorers.values():
            self._end_grader(scorer)

    def _end_grader(self, scorer: LocalClient) -> None:
        if "actor" in vars(scorer):  # it was called
            scorer.actor.close()


class LocalActors(TrainingHost, LocalServing):
    """The counterpart of `hosting.ActorGroup` in this process."""

    def spilled_bytes(self) -> int:
        return 0

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def show_phase(self, phase: str) -> None: ...


def calls_of(learner: Any) -> Callable[..., Any]:
    """Return the function that calls a method of a Learner in this process by its name."""
    return lambda method, *args: getattr(learner, method)(*args)


@contextlib.contextmanager
def learning(config: Config, model: StartingModel, run_dir: Path) -> Iterator[Callable[..., Any]]:
    """Yield the function that calls the methods of a Learner in this process."""
    from grpo_ray.core.learner import Learner

    yield calls_of(Learner(model.path, config, model.end_token_ids))
