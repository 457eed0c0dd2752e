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
    columns["sequences"] = _sequences([row.sequences if isinstance(row, Episode) else None for row in rows])
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
    }


class EpisodeColumns:
    """The columns of a table, as the arguments of its episodes."""

    def __init__(self, table: pa.Table) -> None:
        """Read the columns; a file without episodes has none."""
        self._plain = {
            name: table[name].to_pylist() if name in table.column_names else [None] * table.num_rows
            for name in PLAIN
        }
        self._has_episodes = any(status is not None for status in self._plain["status"])
        if self._has_episodes:
            self._turns = RunLengths(table["turns"], "turn")
            sequences = table["sequences"].combine_chunks()
            self._offsets = sequences.offsets.to_numpy()
            self._prompts = list_rows(sequences.values.field("prompt_token_ids"))
            self._ranges = [sequences.values.field(name).to_pylist() for name in ("start", "end")]

    def is_episode(self, row: int) -> bool:
        return self._plain["status"][row] is not None

    def fields(self, row: int) -> dict[str, Any]:
        """Return the fields of the row's Episode that other completions lack."""
        value: dict[str, Any] = {name: values[row] for name, values in self._plain.items()}
        places = range(self._offsets[row], self._offsets[row + 1])
        starts, ends = self._ranges
        return {
            "turns": self._turns.row(row),
            "sequences": tuple(
                EpisodeSequence(tuple(self._prompts[at].tolist()), starts[at], ends[at]) for at in places
            ),
            "status": value["status"],
            "reward": value["episode_reward"],
            "seconds": value["seconds"],
            "turn_rewards": None if value["turn_rewards"] is None else tuple(value["turn_rewards"]),
            "metrics": dict(value["metrics"]),
            "error": value["episode_error"],
        }

    def turn_advantages(self, start: int, end: int) -> tuple[np.ndarray, ...]:
        """Return those of the group of these rows; empty if it has none."""
        rows = self._plain["turn_advantages"][start:end]
        return () if None in rows else tuple(np.array(row, np.float32) for row in rows)


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


class RunLengths:
    """The rows of a column that `run_lengths` made."""

    def __init__(self, column: pa.ChunkedArray, name: str) -> None:
        spans = column.combine_chunks()
        self._offsets = spans.offsets.to_numpy()
        self._values, starts, ends = (spans.values.field(field).to_numpy() for field in (name, "start", "end"))
        self._lengths = ends - starts

    def row(self, row: int) -> np.ndarray:
        """Return the row's array, int32."""
        spans = slice(self._offsets[row], self._offsets[row + 1])
        return np.repeat(self._values[spans], self._lengths[spans])


def lists(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.ListArray:
    """Return a list column from one array per row, without a Python object per token."""
    values = np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
    return _list_array([len(array) for array in arrays], pa.array(values))


def list_rows(column: pa.ChunkedArray | pa.ListArray) -> list[np.ndarray]:
    """Return views of a list column's rows."""
    rows = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = rows.values.to_numpy()
    return [values[a:b] for a, b in pairwise(rows.offsets.to_numpy().tolist())]


def _sequences(rows: Sequence[tuple[EpisodeSequence, ...] | None]) -> pa.ListArray:
    flat = [sequence for row in rows for sequence in row or ()]
    columns = {
        "prompt_token_ids": lists(
            [np.array(sequence.prompt_token_ids, np.int32) for sequence in flat], np.int32
        ),
        "start": pa.array([sequence.start for sequence in flat], pa.int32()),
        "end": pa.array([sequence.end for sequence in flat], pa.int32()),
    }
    values = pa.StructArray.from_arrays(list(columns.values()), names=list(columns))
    return _list_array([len(row or ()) for row in rows], values, [row is None for row in rows])


def _list_array(lengths: Sequence[int], values: pa.Array, is_null: Sequence[bool] = ()) -> pa.ListArray:
    offsets = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
    mask = pa.array(is_null, pa.bool_()) if any(is_null) else None
    return pa.ListArray.from_arrays(offsets, values, mask=mask)
