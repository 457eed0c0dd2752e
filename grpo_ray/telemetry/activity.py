"""Time and memory of every actor between two steps, read from all of them at the same time."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from grpo_ray.telemetry.memory import resident_bytes
from grpo_ray.telemetry.ranks import RANK
from grpo_ray.telemetry.run_log import Metrics
from grpo_ray.telemetry.stage_clock import ActorStats, StageClock, StageTimes

DRIVER = "driver"
ANSWER_S = 2.0  # an actor that takes longer has no metrics in that step
TRAINING = ("train", "optimizer", "logprobs")  # the Learner's stages


@dataclass(frozen=True)
class Window:
    """The time between two readings."""

    seconds: float
    stats: Mapping[str, ActorStats]
    """Stats of the actors that were read at both ends of the window, and of the driver."""
    is_complete: bool
    """True if every actor that was asked is in `stats`."""

    @property
    def stages(self) -> dict[str, StageTimes]:
        return {name: stats.stages for name, stats in self.stats.items()}

    def metrics(self, num_generators: int) -> Metrics:
        """Return `time/<actor>/<stage>_s`, which add up to each actor's time, and metrics derived from them.

        Args:
            num_generators: the configured number; a Generator that is being replaced counts as idle.
        """
        stages = self.stages
        metrics = {
            f"time/{name}/{stage}_s": seconds
            for name, times in stages.items()
            for stage, seconds in times.seconds.items()
        }
        metrics |= {f"memory/{name}_bytes": float(stats.resident_bytes) for name, stats in self.stats.items()}
        generating = [times.seconds["generate"] for times in stages.values() if "generate" in times.seconds]
        if generating and self.is_complete:
            metrics["timing/generate_s"] = max(generating)
            metrics["utilization/generators"] = sum(generating) / num_generators / self.seconds
        ranks = [times for name, times in stages.items() if RANK.fullmatch(name)]
        if ranks:  # they train the same batches together, so those that answered stand for all
            training = (sum(times.seconds[stage] for stage in TRAINING) / times.wall_s for times in ranks)
            metrics["utilization/learner"] = fmean(training)
        scoring = [times.seconds["score"] for times in stages.values() if "score" in times.seconds]
        if scoring:
            metrics["timing/score_s"] = max(scoring)
        return metrics


class TimedActor(Protocol):
    """Anything with a stage clock that can be read through a call."""

    def take_stats(self) -> Awaitable[ActorStats]: ...


class Activity:
    """Reads the clocks of all actors and of the driver; a dead or silent actor does not delay the others."""

    def __init__(self, clock: StageClock, answer_s: float = ANSWER_S) -> None:
        """Start with no reading yet; `clock` is the driver's."""
        self._clock, self._answer_s = clock, answer_s
        self._asked: dict[str, tuple[TimedActor, asyncio.Task[ActorStats]]] = {}
        self._read: dict[str, TimedActor] = {}  # the actors that answered in time at the last reading

    async def read(self, clients: Mapping[str, TimedActor]) -> Window:
        """Return the window since the last reading.

        Args:
            clients: the serving actors by name; one that was replaced since then has no stats yet.
        """
        own = self._clock.take()
        stats = await self._ask(clients)
        whole = {name: each for name, each in stats.items() if self._read.get(name) is clients[name]}
        self._read = {name: clients[name] for name in stats}
        whole[DRIVER] = ActorStats(own, resident_bytes(with_children=False))
        return Window(
            seconds=own.wall_s,
            stats=whole,
            is_complete=clients.keys() <= whole.keys(),
        )

    async def _ask(self, clients: Mapping[str, TimedActor]) -> dict[str, ActorStats]:
        """Return the answers that came in time. An actor that still owes an answer is not asked again."""
        new: dict[asyncio.Task[ActorStats], str] = {}
        for name, client in clients.items():
            before, answer = self._asked.get(name, (None, None))
            if before is not client or answer is None or answer.done():
                answer = asyncio.create_task(_stats_of(client))
                answer.add_done_callback(_look_at_error)
                self._asked[name], new[answer] = (client, answer), name
        done, _ = await asyncio.wait(new, timeout=self._answer_s) if new else ((), ())
        # In the order of the question: that of a set would differ from run to run.
        in_time = {name: answer for answer, name in new.items() if answer in done}
        return {name: answer.result() for name, answer in in_time.items() if answer.exception() is None}


async def _stats_of(client: TimedActor) -> ActorStats:
    return await client.take_stats()


def _look_at_error(answer: "asyncio.Task[ActorStats]") -> None:
    """Retrieve the exception, or asyncio logs it: a dead actor is handled by the calls that give it work."""
    if not answer.cancelled():
        answer.exception()
