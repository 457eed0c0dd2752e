"""The columns that a file of rollouts has only with episodes; in a row of another completion they are null."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from grpo_ray.records.episode_metrics import episode_facts
from grpo_ray.types import Completion, Episode, EpisodeSequence, ScoredGroup

PLAIN: Mapping[str, pa.DataType] = {
    "status": pa.string(),
    "num_turns": pa.int32(),
    "num_branches": pa.int32(),
    "num_context_tokens": pa.int32(),
    "episode_reward": pa.float64(),  # null if the end says nothing about the policy
    "seconds": pa.float64(),
    "turn_rewards": pa.list_(pa.float64()),
    "turn_advantages": pa.list_(pa.float32()),
    "metrics": pa.map_(pa.string(), pa.float64()),
    "episode_error": pa.string(),
}
SEQUENCES = pa.list_(
    pa.struct({"prompt_token_ids": pa.list_(pa.int32()), "start": pa.int32(), "end": pa.int32()})
)
NAMES = (*PLAIN, "turns", "sequences")


def is_episode(row: Mapping[str, Any]) -> bool:
    """Return True if a row of a file is an episode; files without any lack the column."""
    return row.get("status") is not None


def episode_columns(groups: Sequence[ScoredGroup]) -> dict[str, pa.Array]:
    """Return the columns by name, with one row per completion; none if no group has an episode."""
    rows = [completion for group in groups for completion in group.rollout.completions]
    if not any(isinstance(row, Episode) for row in rows) and not any(g.turn_advantages for g in groups):
        return {}
    per_turn: list[Any] = []
    for group in groups:
        own = [np.asarray(advantages, np.float32) for advantages in group.turn_advantages]
        per_turn += own or [None] * len(group.rollout.completions)
    plain = [_plain(row, advantages) for row, advantages in zip(rows, per_turn, strict=True)]
    columns = {name: pa.array([row.get(name) for row in plain], kind) for name, kind in PLAIN.items()}
    columns["turns"] = run_lengths([row.turns if isinstance(row, Episode) else None for row in rows], "turn")
    columns["sequences"] = pa.array([row.get("sequences") for row in plain], SEQUENCES)
    return columns


def _plain(row: Completion, turn_advantages: np.ndarray | None) -> dict[str, Any]:
    if not isinstance(row, Episode):
        return {"turn_advantages": turn_advantages}
    return {
        **episode_facts(row),
        "episode_reward": row.reward,
        "turn_rewards": row.turn_rewards,
        "turn_advantages": turn_advantages,
        "episode_error": row.error,
        "sequences": [vars(sequence) for sequence in row.sequences],
    }


def episode_fields(table: pa.Table) -> list[dict[str, Any] | None]:
    """Return for each row the fields of its Episode that other completions lack; None: it is no episode."""
    if "status" not in table.column_names:
        return [None] * table.num_rows
    turns = run_length_rows(table["turns"], "turn")
    rows = table.select([*PLAIN, "sequences"]).to_pylist()
    return [_fields(row, own) if is_episode(row) else None for row, own in zip(rows, turns, strict=True)]


def _fields(row: Mapping[str, Any], turns: np.ndarray) -> dict[str, Any]:
    return {
        "turns": turns,
        "sequences": tuple(
            EpisodeSequence(tuple(each["prompt_token_ids"]), each["start"], each["end"])
            for each in row["sequences"]
        ),
        "status": row["status"],
        "reward": row["episode_reward"],
        "seconds": row["seconds"],
        "turn_rewards": None if row["turn_rewards"] is None else tuple(row["turn_rewards"]),
        "metrics": dict(row["metrics"]),
        "error": row["episode_error"],
    }


def run_lengths(arrays: Sequence[np.ndarray | None], name: str) -> pa.ListArray:
    """Return the arrays run-length encoded: elements `[start, end)` of a row have the value in `name`."""
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    values, starts, ends = columns
    counts = []
    for row in arrays:
        edges = [] if row is None else (np.flatnonzero(np.diff(row)) + 1).tolist()  # where the value changes
        bounds = [0, *edges, len(row)] if row is not None and len(row) else []
        starts += bounds[:-1]
        ends += bounds[1:]
        values += [] if row is None else row[bounds[:-1]].tolist()
        counts.append(max(0, len(bounds) - 1))
    spans = [pa.array(column, pa.int32()) for column in columns]
    return _list_array(
        counts, pa.StructArray.from_arrays(spans, names=[name, "start", "end"]), [row is None for row in arrays]
    )


def run_length_rows(column: pa.ChunkedArray, name: str) -> list[np.ndarray]:
    """Return the arrays of a column that `run_lengths` made, int32."""
    spans = column.combine_chunks()
    values, starts, ends = (spans.values.field(field).to_numpy() for field in (name, "start", "end"))
    bounds = pairwise(spans.offsets.to_numpy().tolist())
    return [np.repeat(values[a:b], ends[a:b] - starts[a:b]) for a, b in bounds]


def lists(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.ListArray:
    """Return a list column from one array per row, without a Python object per token."""
    values = np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
    return _list_array([len(array) for array in arrays], pa.array(values))


def list_rows(column: pa.ChunkedArray) -> list[np.ndarray]:
    """Return views of a list column's rows."""
    rows = column.combine_chunks()
    values = rows.values.to_numpy()
    return [values[a:b] for a, b in pairwise(rows.offsets.to_numpy().tolist())]


def _list_array(lengths: Sequence[int], values: pa.Array, is_null: Sequence[bool] = ()) -> pa.ListArray:
    is_short = len(values) < 2**31  # the tokens of a large replay memory are more
    ends = pa.array(np.cumsum([0, *lengths]), pa.int32() if is_short else pa.int64())
    mask = pa.array(is_null, pa.bool_()) if any(is_null) else None
    return (pa.ListArray if is_short else pa.LargeListArray).from_arrays(ends, values, mask=mask)
