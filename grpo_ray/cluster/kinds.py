"""The classes of a run's actors, which only the processes that have one import: that may take seconds."""

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from grpo_ray.core import clients

NOTHING: Mapping[str, int] = {}


class Deferred(partial[Any]):
    """An argument that is built in the actor's process, for objects that cannot be sent there (an engine)."""


@dataclass(frozen=True)
class Kind:
    """A class of actors."""

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


BUFFER = Kind("grpo_ray.core.buffer:TrajectoryBuffer", clients.BufferClient)
ENVIRONMENT = Kind("grpo_ray.episodes.environment_worker:EnvironmentWorker", clients.EnvironmentClient)
GENERATOR = Kind("grpo_ray.core.generator:Generator", clients.GeneratorClient)
LEARNER = Kind("grpo_ray.core.learner:Learner", clients.LearnerClient, is_async=False)
SCORER = Kind("grpo_ray.core.scorer:Scorer", clients.ScorerClient, is_async=False)
TEACHER = Kind("grpo_ray.core.teacher:Teacher", clients.TeacherClient)
WEIGHT_SYNC = Kind("grpo_ray.core.sync:WeightSync", clients.WeightSyncClient)
