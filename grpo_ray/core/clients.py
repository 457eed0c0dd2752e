"""The actors as their callers see them: one Protocol per actor, and every call between processes.

A call returns an awaitable at once. Arguments and bulky results are references (`Ref`), which pass from actor
to actor without their bytes going through the caller; the receiving actor gets the value itself. If a call with
a bulky result fails, awaiting the facts beside it raises its error, before the bulk is used. The classes behind
the Protocols are in the files of the same names; `tests/core/test_actors.py` compares the two.

`cluster/remote_actor.py` makes clients of Ray actors, `cluster/local.py` of objects in the same process.
"""

from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from grpo_ray.episodes.turn_router import TurnClient
from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.transfer.wires import ReceivingGenerator, SendingLearner
from grpo_ray.types import (
    BatchFacts,
    GroupFacts,
    PlayReport,
    PromptItem,
    Ref,
    RolloutGroup,
    SamplingSettings,
    StepReport,
    SyncReport,
    TrainBatch,
    Verdict,
)
from grpo_ray.watch.stage_clock import StageTimes

T = TypeVar("T")


class ActorClient(Protocol):
    """Any actor of a run."""

    @property
    def name(self) -> str: ...
    def ready(self) -> Awaitable[bool]: ...
    def take_stats(self) -> Awaitable[StageTimes]:
        """Return the stage times since the last call, and the process's memory."""


class GeneratorClient(ReceivingGenerator, TurnClient, ActorClient, Protocol):
    """The Generator: an engine that samples groups and loads new weights (generator.py)."""

    def generate(
        self, item: PromptItem, settings: SamplingSettings
    ) -> tuple[Ref[RolloutGroup], Awaitable[int]]: ...
    def stage_weights(self, snapshot: Ref[WeightSnapshot]) -> Awaitable[None]: ...
    def switch(self, phase_timeout_s: float) -> Awaitable[dict[str, float]]: ...
    def sleep(self) -> Awaitable[None]: ...
    def wake(self) -> Awaitable[None]: ...
    def shutdown(self) -> Awaitable[None]: ...


class EnvironmentClient(ActorClient, Protocol):
    """The EnvironmentWorker: groups of episodes, with their turns from Generators (environment_worker.py)."""

    def serve(self, serving: Mapping[int, GeneratorClient]) -> Awaitable[None]: ...
    def failures(self, num_known: int) -> Awaitable[list[tuple[int, str]]]: ...
    def play(
        self, item: PromptItem, settings: SamplingSettings, seed: int
    ) -> tuple[Ref[RolloutGroup], Awaitable[PlayReport]]: ...
    def shutdown(self) -> Awaitable[None]: ...


class ScorerClient(ActorClient, Protocol):
    """The Scorer: verified rewards and group advantages (scorer.py)."""

    def score(self, group: Ref[RolloutGroup]) -> Awaitable[Verdict]: ...


class TeacherClient(ActorClient, Protocol):
    """The Teacher: another model's logprobs of the policy's tokens (teacher.py)."""

    def look_up(self, group: Ref[RolloutGroup]) -> tuple[Ref[np.ndarray], Awaitable[int]]: ...
    def shutdown(self) -> Awaitable[None]: ...


class BufferClient(ActorClient, Protocol):
    """The buffer: the bytes of scored groups, and of replayed ones (buffer.py)."""

    def begin(self, group_ids: Sequence[int]) -> Awaitable[dict[int, GroupFacts]]: ...
    def put(
        self, rollout: Ref[RolloutGroup], verdict: Verdict, teacher_logprobs: Ref[np.ndarray] | None = None
    ) -> Awaitable[None]: ...
    def drop(self, group_ids: Sequence[int]) -> Awaitable[None]: ...
    def take(
        self, step: int, group_ids: Sequence[int], dropped_ids: Sequence[int], oldest_version: int
    ) -> tuple[Ref[TrainBatch], Awaitable[BatchFacts]]: ...
    def capture(self, version: int) -> Awaitable[None]: ...
    def write_captured(self, folder: Path) -> Awaitable[dict[str, int]]: ...
    def flush(self) -> Awaitable[str | None]: ...


class LearnerClient(SendingLearner, ActorClient, Protocol):
    """The Learner: the policy and its optimizer (learner.py)."""

    def train_step(self, batch: Ref[TrainBatch]) -> Awaitable[StepReport]: ...
    def work_done(self) -> Awaitable[int]: ...
    def snapshot(self) -> tuple[Ref[WeightSnapshot], Awaitable[int]]: ...
    def delta(self) -> tuple[Ref[WeightSnapshot | None], Awaitable[float]]: ...
    def make_room(self) -> Awaitable[None]: ...
    def take_room(self) -> Awaitable[None]: ...
    def capture(self) -> Awaitable[StepReport | None]: ...
    def write_captured(self, folder: Path) -> Awaitable[dict[str, int]]: ...


class WeightSyncClient(ActorClient, Protocol):
    """WeightSync: the Generators' version, and the transaction that loads the next (sync.py)."""

    def publish(self, version: int, snapshot: Snapshot, is_initial: bool = False) -> Awaitable[SyncReport]: ...
    def retire(self, number: int) -> Awaitable[None]: ...
    def admit(self, generator: GeneratorClient) -> Awaitable[int]: ...


WITH_BULK = frozenset(("generate", "play", "look_up", "take", "snapshot", "delta"))
"""The calls of all actors that return `(bulk, facts)`."""


class ServingActors(Protocol):
    """The actors that sample and grade, which is all that an evaluation needs."""

    @property
    def generators(self) -> Mapping[str, GeneratorClient]: ...
    @property
    def scorers(self) -> Mapping[str, ScorerClient]: ...
    @property
    def teachers(self) -> Mapping[str, TeacherClient]: ...
    @property
    def environments(self) -> Mapping[str, EnvironmentClient]: ...
    def by_name(self) -> Mapping[str, ActorClient]: ...

    def restart(self, name: str) -> Any:
        """Start a fresh actor in place of `name`; a Generator has the weights that the actors started with."""

    async def fetch(self, reference: Ref[T]) -> T:
        """Bring the value of a reference into this process."""

    def put(self, data: T) -> Ref[T]:
        """Return a reference to `data`, which several actors can be given without a copy for each."""

    def dump_stacks(self) -> None:
        """Make every actor write its threads' Python stacks into its log, even if it is stuck."""


class RunActors(ServingActors, Protocol):
    """All actors of a training run."""

    @property
    def learner(self) -> LearnerClient: ...
    @property
    def buffer(self) -> BufferClient: ...
    @property
    def weight_sync(self) -> WeightSyncClient: ...

    def spilled_bytes(self) -> int:
        """Return the bytes that object stores have written to disk, because their memory was full.

        Returns at once: the figure may be some seconds old.
        """

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export a step's metrics, for Ray's dashboard."""

    def show_phase(self, phase: str) -> None:
        """Export the run's current phase, for Ray's dashboard."""
