"""WeightSync: the version ledger, admission, and the sync transaction."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from grpo_ray.actors.staleness import admission_limit
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

    A version is *published* when every Generator runs it. A Generator that failed a sync is stale.
    """

    def __init__(
        self,
        generators: Sequence[GeneratorClient],
        max_lag: int,
        prompts_per_step: int,
        phase_timeout_s: float,
    ) -> None:
        self._generators = list(generators)
        self._max_lag = max_lag
        self._prompts_per_step = prompts_per_step
        self._phase_timeout_s = phase_timeout_s
        self._versions = {generator.name: 0 for generator in generators}
        self._stale: set[str] = set()
        self._published_version = 0
        self._published = asyncio.Condition()

    def __repr__(self) -> str:
        return f"WeightSync(published={self._published_version})"

    async def ready(self) -> bool:
        return True

    async def admission_limit(self, above: int) -> int:
        """Wait until group ids above `above` may be dispatched; returns the new limit (exclusive)."""
        async with self._published:
            await self._published.wait_for(lambda: self._limit > above)
            return self._limit

    @property
    def _limit(self) -> int:
        return admission_limit(self._published_version, self._max_lag, self._prompts_per_step)

    async def versions(self) -> dict[str, int]:
        """The version each Generator runs."""
        return dict(self._versions)

    async def stale(self) -> frozenset[str]:
        """Generators that failed a sync: what they run is not known until they are synced again."""
        return frozenset(self._stale)

    async def publish(self, version: int, boxed_snapshot: list[Any]) -> SyncReport:
        """The transaction: pause(keep), load, resume, on all Generators at once.

        Args:
            version: the snapshot's.
            boxed_snapshot: the WeightSnapshot or a reference to it, in a list so that a reference passes
                through this process without its bytes.

        Raises:
            WeightSyncError: names the Generator and the phase that failed or timed out.
        """
        if version != self._published_version + 1:
            raise ValueError(f"version {version} cannot follow {self._published_version}")
        snapshot = boxed_snapshot[0]
        seconds = {
            "pause": await self._phase("pause", lambda generator: generator.pause()),
            "transfer": await self._phase("transfer", lambda generator: generator.load_weights(snapshot)),
        }
        self._versions = dict.fromkeys(self._versions, version)
        seconds["resume"] = await self._phase("resume", lambda generator: generator.resume())
        async with self._published:
            self._published_version = version
            self._stale.clear()
            self._published.notify_all()
        return SyncReport(version, {f"timing/weight_sync/{phase}_s": s for phase, s in seconds.items()})

    async def _phase(self, phase: str, call: Any) -> float:
        """Run one phase on every Generator; returns seconds until the slowest had answered."""
        started = time.perf_counter()
        await asyncio.gather(*(self._ask(generator, phase, call(generator)) for generator in self._generators))
        return time.perf_counter() - started

    async def _ask(self, generator: GeneratorClient, phase: str, answer: Awaitable[None]) -> None:
        try:
            await asyncio.wait_for(_as_coroutine(answer), self._phase_timeout_s)
        except TimeoutError as error:
            self._stale.add(generator.name)
            raise WeightSyncError(
                f"weight sync: {generator.name} did not finish phase `{phase}` within "
                f"{self._phase_timeout_s:g} s (weight_sync.phase_timeout_s)"
            ) from error
        except Exception as error:
            self._stale.add(generator.name)
            raise WeightSyncError(
                f"weight sync: {generator.name} failed in phase `{phase}`: {error}"
            ) from error


async def _as_coroutine(answer: Awaitable[None]) -> None:
    await answer
