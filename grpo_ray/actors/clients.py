"""The actors as their callers see them: one Protocol per actor, and every call between processes.

A call returns an awaitable at once. Arguments and bulky results are references (`Ref`), which pass from actor
to actor without their bytes going through the caller; the receiving actor gets the value itself. The classes
behind the Protocols are in the files of the same names; `tests/test_clients.py` compares the two.

`cluster/remote_actor.py` makes clients of Ray actors, `tests/local_actors.py` of objects in the same process.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from grpo_ray.telemetry.stage_clock import ActorStats
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.wire import Meeting
from grpo_ray.types import (
    Admitted,
    BatchFacts,
    Completion,
    GeneratorFailure,
    PlayReport,
    PromptItem,
    PutReceipt,
    Ref,
    RolloutGroup,
    SamplingSettings,
    StepReport,
    SyncReport,
    TrainBatch,
    Verdict,
)

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., object])
_MARK = "returns_bulk_and_facts"


def bulk_and_facts(method: Method) -> Method:
    """Mark an actor's method that returns `(bulk, facts)`.

    Its caller gets a reference to the bulk, to be passed on, and awaits the facts alone. If the method fails,
    awaiting the facts raises its error, before the bulk is used.
    """
    setattr(method, _MARK, True)
    return method


def methods_with_bulk(actor_class: type) -> frozenset[str]:
    """Return the names of the methods that `bulk_and_facts` marks."""
    return frozenset(name for name in dir(actor_class) if hasattr(getattr(actor_class, name), _MARK))


class ActorClient(Protocol):
    """Any actor of a run."""

    @property
    def name(self) -> str: ...
    def ready(self) -> Awaitable[bool]: ...
    def take_stats(self) -> Awaitable[ActorStats]: ...


class GeneratorClient(ActorClient, Protocol):
    """The Generator: an engine that samples groups and loads new weights (generator.py)."""

    def generate(
        self, item: PromptItem, settings: SamplingSettings
    ) -> tuple[Ref[RolloutGroup], Awaitable[int]]: ...
    def sample(self, token_ids: tuple[int, ...], settings: SamplingSettings) -> Awaitable[Completion]: ...
    def join(self, meeting: Meeting) -> Awaitable[None]: ...
    def stage_weights(self, snapshot: Ref[WeightSnapshot]) -> Awaitable[None]: ...
    def pause(self) -> Awaitable[None]: ...
    def load_weights(self) -> Awaitable[None]: ...
    def finish_weights(self) -> Awaitable[None]: ...
    def resume(self) -> Awaitable[float]: ...
    def sleep(self) -> Awaitable[None]: ...
    def wake(self) -> Awaitable[None]: ...


class EnvironmentClient(ActorClient, Protocol):
    """The EnvironmentWorker: groups of episodes, whose turns it sends to Generators (environment_worker.py)."""

    def serve(self, serving: Mapping[int, GeneratorClient]) -> Awaitable[None]: ...
    def failures(self, num_known: int) -> Awaitable[list[GeneratorFailure]]: ...
    def play(
        self, item: PromptItem, settings: SamplingSettings, seed: int
    ) -> tuple[Ref[RolloutGroup], Awaitable[PlayReport]]: ...


class ScorerClient(ActorClient, Protocol):
    """The Scorer: verified rewards and group advantages (scorer.py)."""

    def score(self, group: Ref[RolloutGroup]) -> Awaitable[Verdict]: ...


class BufferClient(ActorClient, Protocol):
    """The buffer: scored groups until their batch is complete, and replayed ones (trajectory_buffer.py)."""

    def begin(self, waiting: Sequence[int], next_id: int) -> Awaitable[int]: ...
    def put(self, rollout: Ref[RolloutGroup], verdict: Verdict) -> Awaitable[PutReceipt]: ...
    def set_aside(self, group_id: int) -> Awaitable[int]: ...
    def take(self, step: int, oldest_version: int) -> tuple[Ref[TrainBatch], Awaitable[BatchFacts]]: ...
    def group_ids(self) -> Awaitable[tuple[int, ...]]: ...
    def capture(self, version: int) -> Awaitable[tuple[int, ...]]: ...
    def write_captured(self, folder: Path) -> Awaitable[dict[str, int]]: ...
    def flush(self) -> Awaitable[str | None]: ...


class LearnerClient(ActorClient, Protocol):
    """The Learner: the policy and its optimizer (learner.py)."""

    def train_step(self, batch: Ref[TrainBatch]) -> Awaitable[StepReport]: ...
    def work_done(self) -> Awaitable[int]: ...
    def snapshot(self) -> tuple[Ref[WeightSnapshot], Awaitable[int]]: ...
    def delta(self) -> tuple[Ref[WeightSnapshot | None], Awaitable[float]]: ...
    def open_wire(self, name: str) -> Awaitable[Meeting]: ...
    def join_wire(self, name: str) -> Awaitable[None]: ...
    def send(self, name: str, version: int) -> Awaitable[None]: ...
    def drop_wire(self, name: str) -> Awaitable[None]: ...
    def release(self, version: int) -> Awaitable[None]: ...
    def make_room(self) -> Awaitable[None]: ...
    def take_room(self) -> Awaitable[None]: ...
    def capture(self) -> Awaitable[StepReport | None]: ...
    def write_captured(self, folder: Path) -> Awaitable[dict[str, int]]: ...


class WeightSyncClient(ActorClient, Protocol):
    """WeightSync: the version ledger, admission, and the sync transaction (weight_sync.py)."""

    def admission(self, known: Admitted) -> Awaitable[Admitted]: ...
    def add_slots(self, num_slots: int) -> Awaitable[Admitted]: ...
    def publish(
        self, version: int, boxed: tuple[Ref[WeightSnapshot], ...], is_initial: bool = False
    ) -> Awaitable[SyncReport]: ...
    def stale(self) -> Awaitable[frozenset[str]]: ...
    def retire(self, name: str) -> Awaitable[None]: ...
    def admit(self, generator: GeneratorClient) -> Awaitable[int]: ...


class ServingActors(Protocol):
    """The actors that sample and grade, which is all that an evaluation needs."""

    @property
    def generators(self) -> Mapping[str, GeneratorClient]: ...
    @property
    def scorers(self) -> Mapping[str, ScorerClient]: ...
    @property
    def environments(self) -> Mapping[str, EnvironmentClient]: ...
    def by_name(self) -> Mapping[str, ActorClient]: ...

    def restart_generator(self, name: str) -> GeneratorClient:
        """Start a fresh Generator in place of `name`, with the weights that the run began with."""

    def restart_worker(self, name: str) -> ActorClient:
        """Start a fresh Scorer or EnvironmentWorker in place of `name`."""

    async def fetch(self, reference: Ref[T]) -> T:
        """Bring the value of a reference into this process."""

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
