"""Learner, Scorer and Teacher of a simulation: they take time, and give answers that a run can work with.

The Learner keeps the run's account, which is independent of the run's own GroupBook.
"""

import asyncio
import json
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from grpo_ray.config import Config
from grpo_ray.core.groups import GroupBook
from grpo_ray.core.staleness import lag_metrics
from grpo_ray.tools.simulation.speeds import Speeds
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.types import Episode, RolloutGroup, ScoredGroup, StepReport, TrainBatch, Verdict
from grpo_ray.watch.stage_clock import ClockedActor, StageClock, StageTimes

STAGES = ("train", "optimizer", "logprobs", "snapshot", "capture", "move")
ANSWER_S = 0.001  # of virtual time, or a whole step could pass in none, and have no rates
NO_BYTES = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Faults:
    """Mistakes that a run must never make, as counts of groups."""

    num_stale: int  # trained with a token older than the schedule allows
    num_repeated: int  # trained twice as fresh groups, or trained and given up
    num_lost: int  # taken from the order of prompts, and neither trained, given up nor waiting

    @property
    def is_none(self) -> bool:
        return not (self.num_stale or self.num_repeated or self.num_lost)


@dataclass
class Account:
    """The groups that the Learner trained, and the lag of their tokens; a restored run forgets later steps."""

    max_age: int
    """Largest allowed lag, in versions."""
    trained: list["array[int]"] = field(default_factory=list)
    """Ids of the fresh groups, by step."""
    lags: list[Counter[int]] = field(default_factory=list)
    """Number of tokens by lag, by step."""
    num_stale: int = 0

    def rewind(self, version: int) -> None:
        """Forget the steps after `version`."""
        del self.trained[version:], self.lags[version:]

    def note(self, version: int, fresh: Sequence[ScoredGroup], replayed: Sequence[ScoredGroup]) -> None:
        """Note the batch that the Learner trains on at `version`."""
        lags: Counter[int] = Counter()
        for group in (*fresh, *replayed):
            found, counts = np.unique(version - group.rollout.sampled_versions, return_counts=True)
            lags.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))
            self.num_stale += bool(found.max(initial=0) > self.max_age)
        self.trained.append(array("q", (group.group_id for group in fresh)))
        self.lags.append(lags)

    def faults(self, book: GroupBook) -> Faults:
        """Compare with the book at the end of the run."""
        times = Counter(group_id for step in self.trained for group_id in step)
        others = book.unfinished | book.given_up
        num_repeated = sum(count - 1 for count in times.values()) + len(others & times.keys())
        num_lost = book.next_id - len(times.keys() | others) - book.num_dropped
        return Faults(self.num_stale, num_repeated, abs(num_lost))

    def lag_shares(self) -> dict[int, float]:
        """Return the share of the trained tokens by lag, over all steps."""
        total: Counter[int] = sum(self.lags, Counter())
        return {lag: count / total.total() for lag, count in sorted(total.items())}


class SimulatedLearner:
    """A Learner with steps that take `train_s + train_token_s * tokens`; its calls run one at a time."""

    def __init__(self, config: Config, speeds: Speeds, account: Account, version: int) -> None:
        """Begin at `version`; the account, which keeps the batches, forgets later steps."""
        self._config, self._speeds, self._account = config, speeds, account
        self.version = version
        account.rewind(version)
        self._turn = asyncio.Lock()
        self._num_done = 0
        self._report: StepReport | None = None
        self._clock = StageClock(STAGES, rest="wait_for_batch")

    async def ready(self) -> bool:
        await asyncio.sleep(self._speeds.start_s)
        return True

    async def take_stats(self) -> StageTimes:
        await asyncio.sleep(ANSWER_S)
        return self._clock.take()

    async def work_done(self) -> int:
        return self._num_done

    async def train_step(self, batch: TrainBatch) -> StepReport:
        """Train on the batch, after the second guard.

        Raises:
            StaleBatchError: a token is older than the schedule allows.
        """
        async with self._turn:
            num_fresh = min(len(batch.groups), self._config.fresh_per_step)
            try:
                lags = lag_metrics(batch.groups, self.version, self._config)
            finally:
                self._account.note(self.version, batch.groups[:num_fresh], batch.groups[num_fresh:])
            num_tokens = sum(c.num_tokens for group in batch.groups for c in group.rollout.completions)
            with self._clock.stage("train", f"step {self.version + 1}") as duration:
                await asyncio.sleep(self._speeds.train_s + self._speeds.train_token_s * num_tokens)
            self.version += 1
            self._num_done += 1
            metrics = {
                **lags,
                "optim/grad_norm": 0.0,
                "optim/skipped_updates": 0.0,
                "optim/skipped_in_a_row": 0.0,
                "throughput/trained_tokens": float(num_tokens),
                "timing/train_s": duration.seconds,
            }
            self._report = StepReport(self.version, metrics)
            return self._report

    async def snapshot(self) -> tuple[WeightSnapshot, int]:
        async with self._turn:
            with self._clock.stage("snapshot"):
                await asyncio.sleep(self._speeds.snapshot_s)
            return WeightSnapshot(self.version, (), NO_BYTES), self.version

    async def delta(self) -> tuple[WeightSnapshot | None, float]:
        return None, 1.0

    async def make_room(self) -> None:
        async with self._turn:
            with self._clock.stage("move"):
                await asyncio.sleep(self._speeds.move_s)

    take_room = make_room

    async def capture(self) -> StepReport | None:
        async with self._turn:
            with self._clock.stage("capture"):
                await asyncio.sleep(self._speeds.snapshot_s)
            return self._report

    async def write_captured(self, folder: Path) -> dict[str, int]:
        text = json.dumps({"version": self.version})
        (folder / "simulated.json").write_text(text)
        return {"simulated.json": len(text)}


class SimulatedScorer(ClockedActor):
    """A Scorer that takes `score_s` per group, and gives rewards of 0 and 1 by chance."""

    def __init__(self, config: Config, speeds: Speeds) -> None:
        self._config, self._speeds = config, speeds
        self._workers = asyncio.Semaphore(config.scorer.num_workers)
        self._clock = StageClock(("score",), rest="wait_for_groups")

    async def score(self, group: RolloutGroup) -> Verdict:
        """Return the rewards of episodes, or some by chance: a group's share of 1 is uniform over groups."""
        async with self._workers:
            with self._clock.stage("score"):
                await asyncio.sleep(self._speeds.score_s)
        algorithm = self._config.algorithm
        episodes = [each for each in group.completions if isinstance(each, Episode)]
        if episodes:
            from grpo_ray.objectives.returns import verdict_on  # loads torch, unlike a plain simulation

            verdict = verdict_on(episodes, algorithm, self._config.episodes.turn_discount)
        else:
            rng = random.Random(f"{self._config.run.seed}/{group.item.group_id}/{group.item.num_cuts}")
            pass_rate = rng.random()
            rewards = np.array([rng.random() < pass_rate for _ in group.completions], np.float32)
            verdict = Verdict(rewards, np.ones_like(rewards), rewards, rewards - rewards.mean())
        teacher = self._config.distillation.teacher
        return verdict.with_facts(group, algorithm.dynamic_sampling_metric, teacher is not None)


class SimulatedTeacher(ClockedActor):
    """A Teacher that takes `teacher_s` per group, one at a time."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._turn = asyncio.Lock()
        self._clock = StageClock(("look_up",), rest="wait_for_groups")

    async def ready(self) -> bool:
        await asyncio.sleep(self._speeds.start_s)
        return True

    async def look_up(self, group: RolloutGroup) -> tuple[np.ndarray, int]:
        """Return logprobs of the group's tokens, float32 `[group_tokens]`, and the number of sampled ones."""
        async with self._turn:
            with self._clock.stage("look_up"):
                await asyncio.sleep(self._speeds.teacher_s)
        num_tokens = sum(len(completion.token_ids) for completion in group.completions)
        return np.broadcast_to(np.float32(-1), num_tokens), sum(c.num_tokens for c in group.completions)
