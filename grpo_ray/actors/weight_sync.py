"""WeightSync: the version ledger, admission, and the sync transaction."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from grpo_ray.actors.staleness import admission_limit, places_beyond
from grpo_ray.config import Config
from grpo_ray.errors import DataLost
from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock
from grpo_ray.types import SyncReport


class GeneratorClient(Protocol):
    """A Generator, here or in another process: each call returns something to await."""

    name: str

    def pause(self) -> Awaitable[None]: ...
    def load_weights(self, snapshot: Any) -> Awaitable[None]: ...
    def resume(self) -> Awaitable[None]: ...


class WeightSyncError(RuntimeError):
    """A Generator failed or did not answer in a phase of the sync."""


class WeightSync:
    """Knows which version each Generator runs, and lets groups be dispatched accordingly.

    A version is *published* when every Generator that serves runs it. One that failed a sync is stale: what
    it runs is not known, so it is out of everything until a fresh one of its name is admitted.
    """

    def __init__(
        self,
        generators: Sequence[GeneratorClient],
        max_lag: int,
        prompts_per_step: int,
        phase_timeout_s: float,
        version: int = 0,
        extra_places: int = 0,
    ) -> None:
        """`version` is the one that every Generator starts with.

        Args:
            max_lag, prompts_per_step, extra_places: see `admission_limit`.
        """
        self._generators = {generator.name: generator for generator in generators}
        self._versions = dict.fromkeys(self._generators, version)
        self._stale: set[str] = set()
        self._max_lag = max_lag
        self._prompts_per_step = prompts_per_step
        self._extra_places = extra_places
        self._phase_timeout_s = phase_timeout_s
        self._published_version = version
        self._snapshot: Any = None  # the published weights, once they are not those that Generators start with
        self._transaction = asyncio.Lock()
        self._published = asyncio.Condition()
        self._clock = StageClock(("pause", "transfer", "resume"), rest="wait_for_version")

    def __repr__(self) -> str:
        stale = f", stale: {', '.join(sorted(self._stale))}" if self._stale else ""
        return f"WeightSync(published={self._published_version}, {self._clock.current}{stale})"

    async def ready(self) -> bool:
        return True

    async def take_stats(self) -> ActorStats:
        """What happened since the last call."""
        return ActorStats(self._clock.take(), resident_bytes(with_children=False))

    async def admission(self, version: int, limit: int) -> tuple[int, int]:
        """Wait until a later version than `version` is published, or ids above `limit` may be dispatched.

        Returns the published version, and the limit of ids that may be dispatched (exclusive).
        """
        async with self._published:
            await self._published.wait_for(lambda: self._published_version > version or self._limit > limit)
            return self._published_version, self._limit

    @property
    def _limit(self) -> int:
        return admission_limit(
            self._published_version, self._max_lag, self._prompts_per_step, self._extra_places
        )

    async def widen(self, num_places: int) -> None:
        """So many groups will not be trained: others take their places."""
        async with self._published:
            self._extra_places += num_places
            self._published.notify_all()

    async def versions(self) -> dict[str, int]:
        """The version that each serving Generator runs."""
        return dict(self._versions)

    async def stale(self) -> frozenset[str]:
        """Generators that failed a sync or died, and have not been admitted again."""
        return frozenset(self._stale)

    async def publish(self, version: int, boxed_snapshot: list[Any]) -> SyncReport:
        """The transaction: pause(keep), load, resume, on all Generators at once.

        A Generator that fails or misses a phase's timeout is stale from there on, and the others go on
        without it; the report names it, with the phase.

        Args:
            version: the snapshot's.
            boxed_snapshot: the WeightSnapshot or a reference to it, in a list so that a reference passes
                through this process without its bytes.

        Raises:
            DataLost: the snapshot is gone with the Learner that made it.
        """
        if version != self._published_version + 1:
            raise ValueError(f"version {version} cannot follow {self._published_version}")
        async with self._transaction:
            seconds, failed = await self._sync(list(self._generators.values()), boxed_snapshot[0], version)
            for name in failed:
                await self.retire(name)
            self._versions = dict.fromkeys(self._generators, version)
            self._snapshot = boxed_snapshot[0]
            async with self._published:
                self._published_version = version
                self._published.notify_all()
        metrics = {f"timing/weight_sync/{phase}_s": s for phase, s in seconds.items()}
        return SyncReport(version, metrics, {name: str(error) for name, error in failed.items()})

    async def retire(self, name: str) -> None:
        """A Generator that died, or is not to be trusted, takes part in nothing any more."""
        self._generators.pop(name, None)
        self._versions.pop(name, None)
        self._stale.add(name)

    async def admit(self, generator: GeneratorClient) -> int:
        """Bring a fresh Generator to the published version; from then on it takes part in every sync.

        Returns the version. Raises:
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
        self, generators: list[GeneratorClient], snapshot: Any, version: int
    ) -> tuple[dict[str, float], dict[str, WeightSyncError]]:
        """Run the phases, each on every Generator that is still there; returns seconds, and who failed."""
        phases: dict[str, Callable[[GeneratorClient], Awaitable[None]]] = {
            "pause": lambda generator: generator.pause(),
            "transfer": lambda generator: generator.load_weights(snapshot),
            "resume": lambda generator: generator.resume(),
        }
        seconds: dict[str, float] = {}
        failed: dict[str, WeightSyncError] = {}
        for phase, call in phases.items():
            present = [g for g in generators if g.name not in failed]
            with self._clock.stage(phase, f"version {version}, {len(present)} Generators") as duration:
                errors = await asyncio.gather(*(self._ask(g, phase, call(g)) for g in present))
            failed |= {g.name: error for g, error in zip(present, errors, strict=True) if error is not None}
            seconds[phase] = duration.seconds
        return seconds, failed

    async def _ask(
        self, generator: GeneratorClient, phase: str, answer: Awaitable[None]
    ) -> WeightSyncError | None:
        try:
            await asyncio.wait_for(_as_coroutine(answer), self._phase_timeout_s)
        except TimeoutError:
            return WeightSyncError(
                f"weight sync: {generator.name} did not finish phase `{phase}` within "
                f"{self._phase_timeout_s:g} s (weight_sync.phase_timeout_s)"
            )
        except DataLost:  # the snapshot is gone, and no Generator is to blame
            raise
        except Exception as error:  # whatever it was, the Generator is out, and the error is reported
            return WeightSyncError(f"weight sync: {generator.name} failed in phase `{phase}`: {error}")
        return None


def weight_sync_arguments(
    config: Config, num_trained: int, num_left: int, version: int
) -> tuple[int, int, float, int, int]:
    """What follows the Generators in WeightSync's arguments, for a run at `version` by its ledger's account."""
    fresh = config.fresh_per_step
    extra = places_beyond(version, num_trained, num_left, config.num_oversampled, fresh)
    sync = config.weight_sync
    return sync.max_lag - config.steps_overtaken, fresh, sync.phase_timeout_s, version, extra


async def _as_coroutine(answer: Awaitable[None]) -> None:
    await answer
