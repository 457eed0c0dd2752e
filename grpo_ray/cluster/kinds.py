"""The kinds of a run's actors, and the calls of their clients, for both hosts."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_ray.core import clients

NOTHING: Mapping[str, int] = {}


class Deferred(partial[Any]):
    """An argument that is built in the actor's process, for objects that cannot be sent there (an engine)."""


@dataclass(frozen=True)
class Kind:
    """A class of actors, which only their processes import: that may take seconds."""

    place: str | type
    """`module:class`, or the class."""
    calls: type
    """The Protocol of its clients, or the class."""
    is_async: bool = True
    """All of its methods are coroutine functions; otherwise none is."""

    @property
    def name(self) -> str:
        return self.place.partition(":")[2] if isinstance(self.place, str) else self.place.__name__

    def make(self, given: Sequence[Any]) -> Any:
        """Return an actor that is given these arguments."""
        built = [argument() if isinstance(argument, Deferred) else argument for argument in given]
        actor = pkgutil.resolve_name(self.place) if isinstance(self.place, str) else self.place
        return actor(*built)


class BaseClient(ABC):
    """A client of an actor, which makes the calls that the Protocols of core/clients.py declare."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):  # pickle asks for such names before there are attributes
            raise AttributeError(method)
        return lambda *args: self._call(method, args)

    @abstractmethod
    def _call(self, method: str, args: Sequence[Any]) -> Any:
        """Begin a call, and return its Answer; with a bulky result, a reference to it and the facts' Answer."""


@dataclass(frozen=True)
class Answer:
    """The future result of a call, which `result` waits for; unlike a coroutine, it need not be awaited."""

    result: Callable[[], Awaitable[Any]]

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.result().__await__()


BUFFER = Kind("grpo_ray.core.buffer:TrajectoryBuffer", clients.BufferClient)
ENVIRONMENT = Kind("grpo_ray.episodes.environment_worker:EnvironmentWorker", clients.EnvironmentClient)
GENERATOR = Kind("grpo_ray.core.generator:Generator", clients.GeneratorClient)
LEARNER = Kind("grpo_ray.core.learner:Learner", clients.LearnerClient, is_async=False)
SCORER = Kind("grpo_ray.core.scorer:Scorer", clients.ScorerClient, is_async=False)
TEACHER = Kind("grpo_ray.core.teacher:Teacher", clients.TeacherClient)
WEIGHT_SYNC = Kind("grpo_ray.core.sync:WeightSync", clients.WeightSyncClient)
