"""WeightSync: the version ledger, admission, and the sync transaction."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from grpo_ray.actors.clients import GeneratorClient
from grpo_ray.actors.staleness import Admission
from grpo_ray.config import Config
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.telemetry.fan_out import gathered
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.wires import Wires
from grpo_ray.types import Admitted, Ref, SyncReport

PHASES = ("stage", "pause", "load", "finish", "resume")


class WeightSyncError(RuntimeError):
    """A Generator's failure or timeout in a phase of the sync."""


class WeightSync:
    """The version that each Generator runs, and the admission of groups that follows from it.

    A version is *published* when every serving Generator runs it. A Generator that failed a sync is stale: its
    version is unknown, so it is excluded until a replacement is admitted under its name.
    """

    name = "weight_sync"

    def __init__(
        self,
        generators: Sequence[GeneratorClient],
        admission: Admission,
        phase_timeout_s: float,
        version: int = 0,
        wires: Wires | None = None,
    ) -> None:
        """
        Args:
            version: the version that every Generator starts with.
            wires: to the Generators, if the transport has any.
        """
        self._generators = {generator.name: generator for generator in generators}
        self._versions = dict.fromkeys(self._generators, version)
        self._stale: set[str] = set()
        self._admission = admission
        self._phase_timeout_s = phase_timeout_s
        self._wires = wires
        self._published_version = version
        # The published weights; None while they are the ones that Generators start with.
        self._snapshot: Ref[WeightSnapshot] | None = None
        self._transaction = asyncio.Lock()
        self._admitted_more = asyncio.Condition()
        self._clock = StageClock(PHASES[::-1], rest="wait_for_version")

    def __repr__(self) -> str:
        stale = f", stale: {', '.join(sorted(self._stale))}" if self._stale else ""
        return f"WeightSync(published={self._published_version}, {self._clock.current}{stale})"

    async def ready(self) -> bool:
        return True

    async def take_stats(self) -> ActorStats:
        """Return the stage times since the last call, and the process's memory."""
        return ActorStats(self._clock.take(), resident_bytes(with_children=False))

    # Admission

    async def admission(self, known: Admitted) -> Admitted:
        """Wait until more is admitted than `known`: a later version, or more groups."""
        async with self._admitted_more:
            await self._admitted_more.wait_for(lambda: self._admitted.exceeds(known))
            return self._admitted

    async def add_slots(self, num_slots: int) -> Admitted:
        """Admit `num_slots` more groups, in place of as many that will not be trained."""
        async with self._admitted_more:
            self._admission.extra_slots += num_slots
            self._admitted_more.notify_all()
            return self._admitted

    @property
    def _admitted(self) -> Admitted:
        return Admitted(self._published_version, self._admission.limit(self._published_version))

    # The version ledger

    async def versions(self) -> dict[str, int]:
        """Return the version that each serving Generator runs."""
        return dict(self._versions)

    async def stale(self) -> frozenset[str]:
        """Return the Generators that failed a sync or died, and have not been admitted again."""
        return frozenset(self._stale)

    async def retire(self, name: str) -> None:
        """Exclude a Generator that died or cannot be trusted, until a replacement is admitted."""
        self._generators.pop(name, None)
        self._versions.pop(name, None)
        self._stale.add(name)

    # The transaction

    async def publish(
        self, version: int, boxed: tuple[Ref[WeightSnapshot], ...], is_initial: bool = False
    ) -> SyncReport:
        """Run the transaction: stage the weights everywhere, then switch each Generator.

        Generators sample while the weights are staged; each then pauses, loads them, commits the version and
        resumes, without waiting for another. A Generator that fails or exceeds a phase's timeout is stale from
        then on, and the others continue without it; the report names it, with the phase.

        Args:
            version: the snapshot's.
            boxed: the reference to the snapshot, in a tuple so that its bytes are not fetched here; then to the
                difference from the last version, if that is to be sent to Generators that have it.
            is_initial: the Generators started with other weights than the current version's, such as the base
                of an adapter; nothing has been sampled yet.

        Raises:
            DataLost, ActorDied: the snapshot was lost with the Learner that made it.
        """
        if version != self._published_version + (not is_initial):
            raise ValueError(f"version {version} cannot follow {self._published_version}")
        whole, sent = boxed[0], boxed[-1]
        async with self._transaction:
            if self._wires is not None:
                await self._wires.release(version)
            metrics, failed = await self._sync(list(self._generators.values()), sent, version, sent is whole)
            for name in failed:
                await self.retire(name)
            self._versions = dict.fromkeys(self._generators, version)
            self._snapshot = whole
            async with self._admitted_more:
                self._published_version = version
                self._admitted_more.notify_all()
        return SyncReport(version, metrics, {name: str(error) for name, error in failed.items()})

    async def admit(self, generator: GeneratorClient) -> int:
        """Bring a fresh Generator to the published version, and include it in every later sync.

        Returns:
            The published version.

        Raises:
            WeightSyncError: names the phase that failed or timed out; the Generator stays stale.
        """
        async with self._transaction:
            if self._snapshot is not None:
                _, failed = await self._sync([generator], self._snapshot, self._published_version)
                if failed:
                    raise failed[generator.name]
            self._generators[generator.name] = generator
            self._versions[generator.name] = self._published_version
            self._stale.discard(generator.name)
            return self._published_version

    async def _sync(
        self,
        generators: Sequence[GeneratorClient],
        snapshot: Ref[WeightSnapshot],
        version: int,
        is_whole: bool = True,
    ) -> tuple[dict[str, float], dict[str, WeightSyncError]]:
        """Run all phases on the Generators; return the slowest one's seconds per phase, and the failures."""
        calls: dict[str, Callable[[GeneratorClient], Awaitable[Any]]] = {
            "stage": lambda generator: generator.stage_weights(snapshot),
            "pause": lambda generator: generator.pause(),
            "load": lambda generator: generator.load_weights(),
            "finish": lambda generator: generator.finish_weights(),
            "resume": lambda generator: generator.resume(),
        }
        if self._wires is not None and is_whole:  # a difference comes with its reference
            calls = self._wires.around(calls, version)
        slowest = dict.fromkeys([*PHASES, "paused"], 0.0)
        failed: dict[str, WeightSyncError] = {}

        async def run(generator: GeneratorClient, phases: Iterable[str]) -> None:
            answer = None
            for phase in phases:
                with self._clock.stage(phase, f"version {version}, {generator.name}") as duration:
                    try:
                        answer = await self._ask(generator, phase, calls[phase](generator))
                    except WeightSyncError as error:
                        failed[generator.name] = error
                        await self._drop_wire(generator.name)
                        return
                slowest[phase] = max(slowest[phase], duration.seconds)
            slowest["paused"] = max(slowest["paused"], answer or 0.0)  # resume tells

        # A snapshot can be lost while it is staged; until then no Generator has another version.
        await _all(run(generator, PHASES[:1]) for generator in generators)
        await _all(run(generator, PHASES[1:]) for generator in generators if generator.name not in failed)
        return {f"timing/weight_sync/{name}_s": seconds for name, seconds in slowest.items()}, failed

    async def _drop_wire(self, name: str) -> None:
        if self._wires is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._phase_timeout_s):
                    await self._wires.drop(name)  # raises ActorDied if the failure was the Learner's death

    async def _ask(self, generator: GeneratorClient, phase: str, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._phase_timeout_s):  # wait_for can swallow a cancellation
                return await answer
        except TimeoutError:
            raise WeightSyncError(
                f"weight sync: {generator.name} did not finish phase `{phase}` within "
                f"{self._phase_timeout_s:g} s (weight_sync.phase_timeout_s)"
            ) from None
        except DataLost:  # the snapshot is gone, and no Generator is to blame
            raise
        except Exception as error:  # any other error excludes the Generator, and is reported
            if isinstance(error, ActorDied) and error.name != generator.name:
                raise  # the Learner's death, in the middle of a transfer
            raise WeightSyncError(
                f"weight sync: {generator.name} failed in phase `{phase}`: {error}"
            ) from error


async def _all(work: Iterable[Awaitable[None]]) -> None:
    """Wait until all work has ended, then raise an error of any."""
    for result in await gathered(work):
        if isinstance(result, BaseException):
            raise result


def admission_of(config: Config) -> Admission:
    """Return the admission of a run that has trained nothing."""
    max_lag = config.weight_sync.max_lag - config.steps_overtaken
    return Admission(max_lag, config.fresh_per_step, config.algorithm.num_steps)
