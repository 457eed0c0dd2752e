"""Rollouts as Parquet: one row a completion, with every token's id, logprob and version."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_ray.types import Completion, ScoredGroup


def write_rollouts(path: str | Path, step: int, groups: Sequence[ScoredGroup]) -> None:
    """Write the groups of a step; the file appears whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")  # hidden: no reader's `*.parquet` finds it
    pq.write_table(_table(step, groups), partial, compression="zstd")
    os.replace(partial, path)


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    return pq.ParquetFile(path).read().to_pylist()


def _table(step: int, groups: Sequence[ScoredGroup]) -> pa.Table:
    completions = [completion for group in groups for completion in group.rollout.completions]
    sizes = [len(group.rollout.completions) for group in groups]

    def per_group(value: Callable[[ScoredGroup], Any]) -> list[Any]:
        return [value(group) for group, size in zip(groups, sizes, strict=True) for _ in range(size)]

    def joined(name: str) -> pa.Array:
        arrays = [getattr(group, name) for group in groups]
        return pa.array(np.concatenate(arrays).astype(np.float32) if arrays else [], pa.float32())

    version_ranges = [
        (c.versions.min(), c.versions.max()) if len(c.versions) else (None, None) for c in completions
    ]
    columns = {
        "step": pa.array([step] * len(completions), pa.int32()),
        "group_id": pa.array(per_group(lambda group: group.group_id), pa.int64()),
        "sample": pa.array([sample for size in sizes for sample in range(size)], pa.int32()),
        "prompt": pa.array(per_group(lambda group: group.rollout.item.prompt), pa.string()),
        "response": pa.array([completion.text for completion in completions], pa.string()),
        "ground_truth": pa.array(per_group(lambda group: group.rollout.item.ground_truth), pa.string()),
        "reward": joined("rewards"),
        "format_reward": joined("format_rewards"),
        "answer_reward": joined("answer_rewards"),
        "advantage": joined("advantages"),
        "num_tokens": pa.array([len(completion.token_ids) for completion in completions], pa.int32()),
        "finish_reason": pa.array([completion.finish_reason for completion in completions], pa.string()),
        "min_version": pa.array([low for low, _ in version_ranges], pa.int32()),
        "max_version": pa.array([high for _, high in version_ranges], pa.int32()),
        "generator": pa.array(per_group(lambda group: group.rollout.generator), pa.string()),
        "token_ids": _lists([completion.token_ids for completion in completions], np.int32),
        "logprobs": _lists([completion.logprobs for completion in completions], np.float32),
        "versions": _version_spans(completions),
    }
    return pa.table(columns)


def _lists(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.ListArray:
    """A column of lists from one array a row, without a Python object for every token."""
    values = np.concatenate(arrays).astype(dtype) if arrays else np.empty(0, dtype)
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), pa.array(values))


def _version_spans(completions: Sequence[Completion]) -> pa.ListArray:
    """Each row's versions as runs: tokens `[start, end)` were sampled by `version`."""
    columns: tuple[list[int], list[int], list[int]] = ([], [], [])
    versions, starts, ends = columns
    counts = []
    for completion in completions:
        row = completion.versions
        edges = np.flatnonzero(np.diff(row)) + 1  # where the version changes
        bounds = [0, *edges.tolist(), len(row)] if len(row) else []
        starts += bounds[:-1]
        ends += bounds[1:]
        versions += row[bounds[:-1]].tolist() if len(row) else []
        counts.append(max(0, len(bounds) - 1))
    arrays = [pa.array(values, pa.int32()) for values in columns]
    spans = pa.StructArray.from_arrays(arrays, names=["version", "start", "end"])
    return pa.ListArray.from_arrays(_offsets(counts), spans)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]).astype(np.int32))
