"""Rollouts for the web page: a seeded sample of a run's Parquet files, read one file after another."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_ray.telemetry.rollout_log import FRESH
from grpo_ray.telemetry.run_files import RunDirectory

FEW = 4  # rollouts that a step in the sample has, where the limit allows so many
ROWS_AT_A_TIME = 256
COLUMNS = (
    "group_id", "sample", "task", "prompt", "response", "ground_truth", "reward", "format_reward",
    "answer_reward", "advantage", "num_tokens", "error", "finish_reason", "min_version", "max_version",
    "generator", "use", "prompt_token_ids", "token_ids", "logprobs", "versions",
)  # fmt: skip
Row = dict[str, Any]


@dataclass(frozen=True)
class StepFile:
    """One step's rollouts, as its small columns tell."""

    step: int
    path: Path
    num_rollouts: int
    standard_error: float | None  # of the step's mean reward


@dataclass(frozen=True)
class RolloutSample:
    """Rows of the files' columns, with their `step`, in the order of steps and of the files."""

    rows: list[Row]
    num_rollouts: int  # in the run
    num_steps: int  # with rollouts, in the run
    num_sampled_steps: int
    seed: int


def step_files(run: RunDirectory) -> list[StepFile]:
    """Every step's file, in order.

    Raises:
        ValueError: a file is damaged.
    """
    return [_look_at(path) for path in sorted(run.rollouts.glob("step-[0-9]*.parquet"))]


def _look_at(path: Path) -> StepFile:
    file = _open(path)
    names = [name for name in ("group_id", "reward", "use") if name in file.schema_arrow.names]
    table = file.read(names)
    if "use" in names:  # what is replayed was rewarded in an earlier step
        table = table.filter(pc.less_equal(table["use"], FRESH))
    means = table.group_by("group_id").aggregate([("reward", "mean")])["reward_mean"].to_numpy()
    step = int(path.stem.removeprefix("step-"))
    return StepFile(step, path, file.metadata.num_rows, standard_error_of(means))


def standard_error_of(group_means: np.ndarray) -> float | None:
    """Of the mean of the groups' mean rewards `[groups]`: `std / sqrt(groups)`, groups as clusters.

    A group's responses share their prompt, so they are no independent draws (Miller, "Adding Error Bars to
    Evals", 2024, arXiv:2411.00640, section 2.2). None for a single group.
    """
    if len(group_means) < 2:
        return None
    return float(np.std(group_means, ddof=1) / math.sqrt(len(group_means)))


def sample_rollouts(files: Sequence[StepFile], limit: int, seed: int) -> RolloutSample:
    """At most `limit` rollouts: as many of each of evenly spaced steps, drawn by the seed and the step.

    No more than one file is open at a time, and of it only the rows that were drawn are kept.

    Raises:
        ValueError: a file is damaged.
    """
    total = sum(file.num_rollouts for file in files)
    few = min(FEW, max(1, total // max(1, len(files))))
    chosen = evenly_spaced(files, max(1, limit // few))
    rows: list[Row] = []
    for place, file in enumerate(chosen):
        share = -(-(limit - len(rows)) // (len(chosen) - place))  # steps with few leave room to others
        dealer = random.Random(f"{seed}/rollouts/{file.step}")
        drawn = sorted(dealer.sample(range(file.num_rollouts), min(share, file.num_rollouts)))
        rows += [{"step": file.step, **row} for row in _read_rows(file.path, np.array(drawn, dtype=int))]
    return RolloutSample(rows, total, len(files), len(chosen), seed)


def evenly_spaced(items: Sequence[StepFile], number: int) -> list[StepFile]:
    """At most `number` of them, the last and (of several) the first included."""
    if len(items) <= number:
        return list(items)
    places = np.linspace(len(items) - 1, 0, number).round().astype(int)[::-1]
    return [items[place] for place in places]


def _read_rows(path: Path, places: np.ndarray) -> Iterator[Row]:
    """The rows at the places, which are sorted."""
    file = _open(path)
    columns = [name for name in COLUMNS if name in file.schema_arrow.names]
    start = 0
    for batch in file.iter_batches(ROWS_AT_A_TIME, columns=columns):
        wanted = places[(places >= start) & (places < start + batch.num_rows)] - start
        yield from batch.take(pa.array(wanted)).to_pylist()
        start += batch.num_rows


def _open(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error}); remove it, and its step is left out") from None
