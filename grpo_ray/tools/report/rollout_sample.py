"""Rollouts for the web page: a seeded sample of a run's Parquet files, read one file at a time."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_ray.records.episode_columns import NAMES as EPISODE_COLUMNS
from grpo_ray.records.evaluation_summary import standard_error
from grpo_ray.records.rollout_log import FRESH, damage_named
from grpo_ray.records.run_files import RunDirectory, files_by_step

FEW = 4  # rollouts per sampled step, if the limit allows it
MAX_FILES = 500  # opened per run: one takes a millisecond on a local disk, and far more on a network's
ROWS_AT_A_TIME = 256
DAMAGED = "not a Parquet file ({}); remove it to leave its step out"
FACTS = (
    "group_id", "sample", "task", "reward", "format_reward", "answer_reward", "advantage", "num_tokens",
    "error", "ungradable", "finish_reason", "min_version", "max_version", "generator", "use",
)  # fmt: skip
TEXTS = ("prompt", "response", "ground_truth")
COLUMNS = (*FACTS, *TEXTS, "prompt_token_ids", "token_ids", "logprobs", "versions", *EPISODE_COLUMNS)
Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class StepFile:
    """The file of one step's rollouts, and facts from its small columns."""

    step: int
    path: Path
    num_rollouts: int
    standard_error: float | None  # of the step's mean reward


@dataclass(frozen=True)
class StepFiles:
    """The inspected files of a run, in order: all, or evenly spaced ones with the first and the last."""

    inspected: list[StepFile]
    steps: list[int]  # with rollouts, in the run

    @property
    def are_sampled(self) -> bool:
        return len(self.inspected) < len(self.steps)

    @property
    def num_rollouts(self) -> int:
        """The number in the run; an estimate from the inspected files if they are a sample."""
        known = sum(file.num_rollouts for file in self.inspected)
        return round(known / len(self.inspected) * len(self.steps)) if self.inspected else 0

    def standard_errors(self) -> dict[int, float | None]:
        """Return the standard error of each step's mean reward: that of the nearest inspected step."""
        if not self.inspected:
            return {}
        known = np.array([file.step for file in self.inspected])
        middles = (known[1:] + known[:-1]) / 2
        nearest = [self.inspected[place] for place in np.searchsorted(middles, self.steps)]
        return {step: file.standard_error for step, file in zip(self.steps, nearest, strict=True)}


def step_files(run: RunDirectory) -> StepFiles:
    """Inspect every step's file, or `MAX_FILES` of them, in order.

    Raises:
        ValueError: a file is damaged.
    """
    found = files_by_step(run.rollouts)
    chosen = evenly_spaced(list(found.items()), MAX_FILES)
    return StepFiles([_step_file(step, path) for step, path in chosen], list(found))


def _step_file(step: int, path: Path) -> StepFile:
    with damage_named(path, DAMAGED):
        file = pq.ParquetFile(path)
        table = file.read(["group_id", "reward", "use"])
    table = table.filter(pc.less_equal(table["use"], FRESH))  # replayed groups counted in an earlier step
    means = table.group_by("group_id").aggregate([("reward", "mean")])["reward_mean"].to_numpy()
    # A group's responses share their prompt, so groups are the independent draws (Miller, "Adding Error Bars to
    # Evals", 2024, arXiv:2411.00640, section 2.2).
    error = standard_error(means) if len(means) > 1 else None
    return StepFile(step, path, file.metadata.num_rows, error)


def sample_rollouts(files: StepFiles, limit: int, seed: int) -> list[Row]:
    """Draw at most `limit` rows, equally many from each of several evenly spaced steps, with their `step`.

    They are in the order of the steps, and within them of the files; seed and step decide which. One file at a
    time is open, and only its drawn rows are kept in memory.

    Raises:
        ValueError: a file is damaged.
    """
    few = min(FEW, max(1, files.num_rollouts // max(1, len(files.steps))))
    chosen = evenly_spaced(files.inspected, max(1, limit // few))
    rows: list[Row] = []
    for place, file in enumerate(chosen):
        share = -(-(limit - len(rows)) // (len(chosen) - place))  # small steps leave room for others
        dealer = random.Random(f"{seed}/rollouts/{file.step}")
        drawn = sorted(dealer.sample(range(file.num_rollouts), min(share, file.num_rollouts)))
        rows += [{"step": file.step, **row} for row in _read_rows(file.path, np.array(drawn, dtype=int))]
    return rows


def evenly_spaced(items: Sequence[T], number: int) -> list[T]:
    """Choose at most `number` items, including the last and, if there are several, the first."""
    if len(items) <= number:
        return list(items)
    places = np.linspace(len(items) - 1, 0, number).round().astype(int)[::-1]
    return [items[place] for place in places]


def _read_rows(path: Path, places: np.ndarray) -> Iterator[Row]:
    """Yield the rows at the sorted places."""
    start = 0
    with damage_named(path, DAMAGED):
        for batch in pq.ParquetFile(path).iter_batches(ROWS_AT_A_TIME, columns=COLUMNS):
            wanted = places[(places >= start) & (places < start + batch.num_rows)] - start
            yield from batch.take(pa.array(wanted)).to_pylist()
            start += batch.num_rows
