"""Time and memory of every actor between two steps, read from all of them at the same time."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Protocol

from grpo_ray.watch.event_loop import breathe
from grpo_ray.watch.memory import resident_bytes
from grpo_ray.watch.metrics_catalog import RANK, by_number
from grpo_ray.watch.run_log import Metrics
from grpo_ray.watch.stage_clock import StageClock, StageTimes

DRIVER = "driver"
ANSWER_S = 2.0  # an actor that takes longer has no metrics in that step
GENERATOR = "generator-"  # then its number
NUM_SHOWN = 16  # Generators with metrics and a row in the timeline of their own
ALL, SLOWEST = "generators", "slowest-generator"
TRAINING = ("train", "optimizer", "logprobs")  # the Learner's stages


@dataclass(frozen=True)
class Window:
    """The time between two readings."""

    seconds: float
    stats: Mapping[str, StageTimes]
    """Times of the actors that were read at both ends of the window, and of the driver."""
    is_complete: bool
    """True if every actor that was asked is in `stats`."""

    @property
    def drawn(self) -> dict[str, StageTimes]:
        """The actors that the timeline shows: of the Generators the first `NUM_SHOWN`."""
        hidden = set(self._generators[NUM_SHOWN:])
        return {name: times for name, times in self.stats.items() if name not in hidden}

    @cached_property
    def _generators(self) -> list[str]:
        return sorted((name for name in self.stats if name.startswith(GENERATOR)), key=by_number)

    def _mean(self) -> StageTimes:
        """Return the mean over the Generators; its stages add up to the step's time, too."""
        generators = [self.stats[name] for name in self._generators]
        seconds = {stage: fmean(each.seconds[stage] for each in generators) for stage in generators[0].seconds}
        memory = fmean(each.resident_bytes for each in generators)
        return StageTimes(fmean(each.wall_s for each in generators), seconds, resident_bytes=int(memory))

    def _slowest(self) -> tuple[StageTimes, float]:
        """Return the Generator that sampled longest, and its number."""
        name = max(self._generators, key=lambda name: self.stats[name].seconds.get("generate", 0.0))
        return self.stats[name], float(name.removeprefix(GENERATOR))

    def metrics(self, num_generators: int) -> Metrics:
        """Return `time/<actor>/<stage>_s`, which add up to each actor's time, and metrics derived from them.

        More than `NUM_SHOWN` Generators share two actors, their mean and the slowest: a line of metrics.jsonl
        would otherwise grow with each one.

        Args:
            num_generators: the configured number; a Generator that is being replaced counts as idle.
        """
        metrics: Metrics = {}
        shown = self.stats
        if len(self._generators) > NUM_SHOWN:  # their mean, and the slowest
            slowest, metrics["generators/slowest"] = self._slowest()
            others = {name: times for name, times in shown.items() if not name.startswith(GENERATOR)}
            shown = {**others, ALL: self._mean(), SLOWEST: slowest}
        for name, times in shown.items():
            metrics |= {f"time/{name}/{stage}_s": spent for stage, spent in times.seconds.items()}
        metrics |= {f"memory/{name}_bytes": float(times.resident_bytes) for name, times in shown.items()}
        generators = [times for times in self.stats.values() if "generate" in times.seconds]
        if generators and self.is_complete:
            metrics["timing/generate_s"] = max(times.seconds["generate"] for times in generators)
            # An answer that came late covers more than the window, and that of a replacement less.
            shares = (times.seconds["generate"] / max(times.wall_s, self.seconds) for times in generators)
            metrics["utilization/generators"] = sum(shares) / num_generators
        ranks = [times for name, times in self.stats.items() if RANK.fullmatch(name)]
        if ranks:  # they train the same batches together, so those that answered stand for all
            training = (sum(times.seconds[stage] for stage in TRAINING) / times.wall_s for times in ranks)
            metrics["utilization/learner"] = fmean(training)
        scoring = [times.seconds["score"] for times in self.stats.values() if "score" in times.seconds]
        if scoring:
            metrics["timing/score_s"] = max(scoring)
        return metrics


class TimedActor(Protocol):
    """Anything with a stage clock that can be read through a call."""

    def take_stats(self) -> Awaitable[StageTimes]: ...


class Activity:
    """Reads the clocks of all actors and of the driver; a dead or silent actor does not delay the others."""

    def __init__(self, clock: StageClock, answer_s: float = ANSWER_S) -> None:
        """Start with no reading yet; `clock` is the driver's."""
        self._clock, self._answer_s = clock, answer_s
        self._asked: dict[str, tuple[TimedActor, asyncio.Task[StageTimes]]] = {}
        self._read: dict[str, TimedActor] = {}  # the actors that answered in time at the last reading

    async def read(self, clients: Mapping[str, TimedActor]) -> Window:
        """Return the window since the last reading.

        Args:
            clients: the serving actors by name; one that was replaced since then has no stats yet.
        """
        own = self._clock.take(resident_bytes(with_children=False))
        stats = await self._ask(clients)
        whole = {name: each for name, each in stats.items() if self._read.get(name) is clients[name]}
        self._read = {name: clients[name] for name in stats}
        whole[DRIVER] = own
        return Window(seconds=own.wall_s, stats=whole, is_complete=clients.keys() <= whole.keys())

    async def _ask(self, clients: Mapping[str, TimedActor]) -> dict[str, StageTimes]:
        """Return the answers that came in time. An actor that still owes an answer is not asked again."""
        new: dict[asyncio.Task[StageTimes], str] = {}
        for name, client in clients.items():
            before, answer = self._asked.get(name, (None, None))
            if before is not client or answer is None or answer.done():
                answer = asyncio.ensure_future(client.take_stats())
                # Or asyncio logs its error: a dead actor is handled by the calls that give it work.
                answer.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._asked[name], new[answer] = (client, answer), name
                await breathe(len(new))
        done, _ = await asyncio.wait(new, timeout=self._answer_s) if new else ((), ())
        # In the order of the question: that of a set would differ from run to run.
        in_time = {name: answer for answer, name in new.items() if answer in done}
        return {name: answer.result() for name, answer in in_time.items() if answer.exception() is None}
