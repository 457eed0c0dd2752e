"""WeightSync: the version that each Generator runs, and the transaction that loads the next one."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from grpo_ray.core.clients import GeneratorClient
from grpo_ray.errors import ActorDied, DataLost
from grpo_ray.transfer.messages import Snapshot, WeightSnapshot
from grpo_ray.transfer.wires import Wires
from grpo_ray.types import Ref, SyncReport
from grpo_ray.watch.event_loop import gathered
from grpo_ray.watch.stage_clock import ClockedActor, StageClock

CALLS = ("stage", "switch")
PHASES = ("stage", "pause", "load", "finish", "resume")  # `switch` is all but the first
SWITCH_LIMITS = 2  # a Generator limits each phase itself; this is for one that cannot, sooner than a stall


class WeightSyncError(RuntimeError):
    """A Generator's failure or timeout in a call of the sync."""


class WeightSync(ClockedActor):
    """The only writer of the Generators' weights, and the record of their versions.

    A version is *published* when every serving Generator runs it; `publish` returns then, and its answer is
    what opens admission (core/groups.py). A Generator that fails a sync is excluded, by the number of its
    process: its version is unknown. A replacement has a number of its own.
    """

    name, _has_children = "weight_sync", False

    def __init__(
        self, generators: Sequence[GeneratorClient], phase_timeout_s: float, version: int = 0,
        wires: Wires | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            version: the version that every Generator starts with.
            wires: to the Generators, if the transport has any.
        """
        self._generators = {generator.number: generator for generator in generators}
        self._phase_timeout_s = phase_timeout_s
        self._wires = wires
        self._published_version = version
        # The published weights; None while they are the ones that Generators start with.
        self._weights: Ref[WeightSnapshot] | None = None
        self._transaction = asyncio.Lock()
        self._clock = StageClock(CALLS[::-1], rest="wait_for_version")

    async def versions(self) -> dict[str, int]:
        """Return the version that each serving Generator runs, by its name."""
        return {generator.name: self._published_version for generator in self._generators.values()}

    async def retire(self, number: int) -> None:
        """Exclude a Generator's process that died or cannot be trusted."""
        self._generators.pop(number, None)

    async def publish(self, version: int, snapshot: Snapshot, is_initial: bool = False) -> SyncReport:
        """Run the transaction: stage the weights everywhere, then switch each Generator.

        Generators sample while the weights are staged. Each one is then switched by one call: it pauses, loads
        them, commits the version and resumes, without waiting for another. A Generator that fails or exceeds a
        call's timeout is excluded from then on, and the others continue without it; the report has its number.

        Args:
            version: the snapshot's.
            is_initial: the Generators started with other weights than the current version's, such as the base
                of an adapter; nothing has been sampled yet.

        Raises:
            DataLost, ActorDied: the snapshot was lost with the Learner that made it.
        """
        if version != self._published_version + (not is_initial):
            raise ValueError(f"version {version} cannot follow {self._published_version}")
        async with self._transaction:
            if self._wires is not None:
                await self._wires.release(version)
            sent: Ref[Any] = snapshot.whole if snapshot.changes is None else snapshot.changes
            generators = list(self._generators.values())
            metrics, failed = await self._sync(generators, sent, version, snapshot.changes is None)
            for number in failed:
                await self.retire(number)
            self._weights, self._published_version = snapshot.whole, version
        return SyncReport(version, metrics, {number: str(error) for number, error in failed.items()})

    async def admit(self, generator: GeneratorClient) -> int:
        """Bring a fresh Generator to the published version, and include it in every later sync.

        Returns:
            The published version.

        Raises:
            WeightSyncError: names the call that failed or timed out; the Generator is not included.
        """
        async with self._transaction:
            if self._weights is not None:
                _, failed = await self._sync([generator], self._weights, self._published_version)
                if failed:
                    raise failed[generator.number]
            self._generators[generator.number] = generator
            return self._published_version

    async def _sync(
        self, generators: Sequence[GeneratorClient], weights: Ref[WeightSnapshot], version: int,
        is_whole: bool = True,
    ) -> tuple[dict[str, float], dict[int, WeightSyncError]]:  # fmt: skip
        """Make both calls to the Generators; return the slowest one's seconds per phase, and the failures."""
        wires = self._wires if is_whole else None  # a difference comes with its reference
        slowest = dict.fromkeys([*PHASES, "paused"], 0.0)
        failed: dict[int, WeightSyncError] = {}

        async def call(generator: GeneratorClient, what: str, begin: Callable[[], Awaitable[Any]]) -> None:
            with self._clock.stage(what, f"version {version}, {generator.name}") as duration:
                answer = begin() if wires is None else wires.carry(what, generator, version, begin)
                try:
                    seconds = await self._ask(generator, what, answer)
                except WeightSyncError as error:
                    failed[generator.number] = error
                    await self._drop_wire(generator.name)
                    return
            for phase, value in (seconds or {what: duration.seconds}).items():
                slowest[phase] = max(slowest[phase], value)

        # A snapshot can be lost while it is staged; until then no Generator has another version.
        await gathered(call(g, "stage", partial(g.stage_weights, weights)) for g in generators)
        staged = [g for g in generators if g.number not in failed]
        await gathered(call(g, "switch", partial(g.switch, self._phase_timeout_s)) for g in staged)
        return {f"timing/weight_sync/{name}_s": seconds for name, seconds in slowest.items()}, failed

    async def _drop_wire(self, name: str) -> None:
        if self._wires is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._phase_timeout_s):
                    await self._wires.drop(name)  # raises ActorDied if the failure was the Learner's death

    async def _ask(self, generator: GeneratorClient, what: str, answer: Awaitable[Any]) -> Any:
        try:
            limit_s = self._phase_timeout_s * (1 if what == "stage" else SWITCH_LIMITS)
            async with asyncio.timeout(limit_s):  # wait_for can swallow a cancellation
                return await answer
        except TimeoutError:
            raise WeightSyncError(
                f"weight sync: {generator.name} did not finish `{what}` within "
                f"{limit_s:g} s (weight_sync.phase_timeout_s)"
            ) from None
        except DataLost:  # the snapshot is gone, and no Generator is to blame
            raise
        except Exception as error:  # any other error excludes the Generator, and is reported
            if isinstance(error, ActorDied) and error.name != generator.name:
                raise  # the Learner's death, in the middle of a transfer
            raise WeightSyncError(f"weight sync: {generator.name} failed in `{what}`: {error}") from error
