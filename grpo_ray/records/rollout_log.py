"""Rollouts as Parquet: one row per completion, with every token's id, logprob and version.

The format is lossless: a checkpoint keeps the groups that are waiting to be trained in such a file. Its columns
are documented in docs/rollouts.md.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_ray.records.durable import replacing
from grpo_ray.records.episode_columns import (
    episode_columns,
    episode_fields,
    list_rows,
    lists,
    run_length_rows,
    run_lengths,
)
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.visible_text import encodable, visible
from grpo_ray.types import TERM, Completion, Episode, PromptItem, RolloutGroup, ScoredGroup, Verdict

SCHEMA_VERSION = "1"  # increased when a column changes its meaning; new columns leave it
PART = 1000  # rows of a log that are Python objects at a time: ten times as large as in a table
DROPPED, FRESH = 0, 1  # values of `use`: sampled for the step but left out, or trained for the first time


def write_rollouts(
    path: str | Path, step: int | None, groups: Sequence[ScoredGroup], uses: Sequence[int] | None = None,
    fsync: bool = False,
) -> str | None:  # fmt: skip
    """Write groups to a file, which appears whole or not at all.

    Args:
        step: the step that the groups were trained in; None: they are still waiting.
        uses: for each group, the number of batches it has been in, including this one; default FRESH.

    Returns:
        A note on groups that Parquet cannot hold as they are: they are written as `_storable` makes them.
    """
    note = None
    with replacing(Path(path), fsync) as partial:
        uses = uses or [FRESH] * len(groups)
        try:
            table = _table(step, groups, uses)
        except Exception:  # one group must not keep the others from being written
            problems = [_problem(group) for group in groups]
            fixed = [_storable(g) if problem else g for g, problem in zip(groups, problems, strict=True)]
            table = _table(step, fixed, uses)
            note = f"{path}: not written as they were: {'; '.join(filter(None, problems))}"
            logging.warning("%s", note)
        pq.write_table(table, partial, compression="zstd")
    return note


def read_table(path: str | Path) -> pa.Table:
    """Return the file's table, one row per completion; raises as `damage_named`."""
    with damage_named(path):
        return pq.ParquetFile(path).read()


def log_table(lines: StepLines) -> pa.Table:
    """Return a log's rows by step, a column per name; raises DamagedLine."""
    rows, parts = iter(lines), [pa.table({})]
    while some := list(islice(rows, PART)):
        names = list(dict.fromkeys(name for row in some for name in row))
        parts.append(pa.table({name: pa.array([row.get(name) for row in some]) for name in names}))
    return pa.concat_tables(parts, promote_options="permissive")


@contextmanager
def damage_named(path: str | Path, text: str = "not readable as Parquet ({})") -> Iterator[None]:
    """Name the file in errors of reading it; `text` has `{}` for Arrow's own message.

    Raises:
        pa.ArrowInvalid: the file is damaged; a ValueError.
    """
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not Arrow's own
            raise
        raise pa.ArrowInvalid(f"{path}: {text.replace('{}', str(error))}") from None


def read_rollouts(path: str | Path) -> list[dict[str, Any]]:
    """Return the file's rows, one per completion."""
    rows: list[dict[str, Any]] = read_table(path).to_pylist()
    return rows


def read_groups(path: str | Path) -> tuple[ScoredGroup, ...]:
    """Return the groups that `write_rollouts` wrote, bit for bit and in the same order."""
    table = read_table(path)
    starts = [row for row, sample in enumerate(table["sample"].to_pylist()) if sample == 0]
    columns = _Columns(table)
    return tuple(columns.group(a, b) for a, b in pairwise([*starts, table.num_rows]))


def read_uses(path: str | Path) -> list[int]:
    """Return the `uses` of the file's groups, in the same order."""
    columns = pq.ParquetFile(path).read(["sample", "use"])
    uses: list[int] = columns.filter(pc.equal(columns["sample"], 0))["use"].to_pylist()
    return uses


class _Columns:
    """A table's columns as Python strings and NumPy arrays, without a Python object per token."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        names = (
            "group_id", "task", "prompt", "response", "ground_truth", "error", "finish_reason", "generator",
        )  # fmt: skip
        self._plain = {name: table[name].to_pylist() for name in names}
        for name in ("about", "ungradable", "turn_advantages"):  # which not every file has
            is_there = name in table.column_names
            self._plain[name] = table[name].to_pylist() if is_there else [None] * table.num_rows
        self._prompt_ids = list_rows(table["prompt_token_ids"])
        self._token_ids = list_rows(table["token_ids"])
        self._logprobs = list_rows(table["logprobs"])
        has_teacher = "teacher_logprobs" in table.column_names
        self._teacher = list_rows(table["teacher_logprobs"]) if has_teacher else []
        self._versions = run_length_rows(table["versions"], "version")
        self._terms = [
            (name.removeprefix(TERM), table[name]) for name in table.column_names if name.startswith(TERM)
        ]
        self._episodes = episode_fields(table)

    def group(self, start: int, end: int) -> ScoredGroup:
        """Return the group of these rows."""
        plain = {name: values[start] for name, values in self._plain.items()}
        prompt_ids = tuple(self._prompt_ids[start].tolist())
        item = PromptItem(
            plain["group_id"], plain["prompt"], prompt_ids, plain["ground_truth"], task=plain["task"],
            about=plain["about"] or "",
        )  # fmt: skip
        completions = tuple(self._completion(row) for row in range(start, end))
        rewards, formats, answers, advantages = (
            self._table[name][start:end].to_numpy().copy()
            for name in ("reward", "format_reward", "answer_reward", "advantage")
        )
        rollout = RolloutGroup(item, completions, plain["generator"])
        errors, ungradable = (
            {sample: text for sample, text in enumerate(texts[start:end]) if text is not None}
            for texts in (self._plain["error"], self._plain["ungradable"])
        )
        by_turn = self._plain["turn_advantages"][start:end]
        per_turn = () if None in by_turn else tuple(np.array(each, np.float32) for each in by_turn)
        taught = np.concatenate(self._teacher[start:end]) if self._teacher else None
        terms = {name: column[start:end] for name, column in self._terms}
        of_task = {n: c.to_numpy().copy() for n, c in terms.items() if c.null_count < len(c)}
        scores = Verdict(rewards, formats, answers, advantages, errors, ungradable, per_turn, terms=of_task)
        return ScoredGroup.of(rollout, scores, taught)

    def _completion(self, row: int) -> Completion:
        fields = {
            "text": self._plain["response"][row],
            "token_ids": self._token_ids[row].copy(),  # a view would keep the whole column in memory
            "logprobs": self._logprobs[row].copy(),
            "versions": self._versions[row],
            "finish_reason": self._plain["finish_reason"][row],
        }
        of_episode = self._episodes[row]
        return Completion(**fields) if of_episode is None else Episode(**fields, **of_episode)


def _table(step: int | None, groups: Sequence[ScoredGroup], uses: Sequence[int]) -> pa.Table:
    completions = [completion for group in groups for completion in group.rollout.completions]
    sizes = [len(group.rollout.completions) for group in groups]

    def per_group(value: Callable[[ScoredGroup], Any]) -> list[Any]:
        return [value(group) for group, size in zip(groups, sizes, strict=True) for _ in range(size)]

    def joined(name: str) -> pa.Array:
        arrays = [getattr(group, name) for group in groups]
        return pa.array(np.concatenate(arrays).astype(np.float32) if arrays else [], pa.float32())

    def prompt_token_ids(group: ScoredGroup) -> np.ndarray:
        return np.array(group.rollout.item.prompt_token_ids, dtype=np.int32)

    version_ranges = [
        (sampled.min(), sampled.max()) if len(sampled) else (None, None)
        for sampled in (completion.versions[completion.mask] for completion in completions)
    ]
    abouts = per_group(lambda group: group.rollout.item.about)
    own = {"about": pa.array(abouts, pa.string())} if any(abouts) else {}  # only with functions of the user's
    for name in dict.fromkeys(name for group in groups for name in group.terms):  # of a reward of several
        # Null in groups of a task without the term, and NaN where it does not apply.
        of_groups = [group.terms.get(name, [None] * size) for group, size in zip(groups, sizes, strict=True)]
        own[f"{TERM}{name}"] = pa.array([value for values in of_groups for value in values], pa.float32())
    taught = [row for group in groups for row in group.teacher_rows if row is not None]  # all rows, or none
    columns = {
        "step": pa.array([step] * len(completions), pa.int32()),
        "use": pa.array([use for use, size in zip(uses, sizes, strict=True) for _ in range(size)], pa.int32()),
        "group_id": pa.array(per_group(lambda group: group.group_id), pa.int64()),
        "task": pa.array(per_group(lambda group: group.rollout.item.task), pa.string()),
        "sample": pa.array([sample for size in sizes for sample in range(size)], pa.int32()),
        "prompt": pa.array(per_group(lambda group: group.rollout.item.prompt), pa.string()),
        "response": pa.array([completion.text for completion in completions], pa.string()),
        "ground_truth": pa.array(per_group(lambda group: group.rollout.item.ground_truth), pa.string()),
        "reward": joined("rewards"),
        "format_reward": joined("format_rewards"),
        "answer_reward": joined("answer_rewards"),
        "advantage": joined("advantages"),
        "num_tokens": pa.array([completion.num_tokens for completion in completions], pa.int32()),
        "error": pa.array([g.errors.get(s) for g in groups for s in range(len(g.rewards))], pa.string()),
        "ungradable": pa.array(
            [g.ungradable.get(s) for g in groups for s in range(len(g.rewards))], pa.string()
        ),
        "finish_reason": pa.array([completion.finish_reason for completion in completions], pa.string()),
        "min_version": pa.array([low for low, _ in version_ranges], pa.int32()),
        "max_version": pa.array([high for _, high in version_ranges], pa.int32()),
        "generator": pa.array(per_group(lambda group: group.rollout.generator), pa.string()),
        "prompt_token_ids": lists(per_group(prompt_token_ids), np.int32),
        "token_ids": lists([completion.token_ids for completion in completions], np.int32),
        "logprobs": lists([completion.logprobs for completion in completions], np.float32),
        "versions": run_lengths([completion.versions for completion in completions], "version"),
        **own,
        **({"teacher_logprobs": lists(taught, np.float32)} if taught else {}),
        **episode_columns(groups),
    }
    return pa.table(columns, metadata={"grpo_ray.rollouts": SCHEMA_VERSION})


def _problem(group: ScoredGroup) -> str:
    """Return the reason that Parquet cannot hold the group; empty if it can."""
    try:
        _table(None, [group], [FRESH])
    except Exception as error:
        return visible(f"group {group.group_id} ({type(error).__name__}: {error})")
    return ""


def _storable(group: ScoredGroup) -> ScoredGroup:
    """Return the group with its texts escaped and its numbers as floats; what is neither is left out."""
    item = replace(group.rollout.item, **_texts(group.rollout.item, "prompt", "ground_truth", "task", "about"))
    completions = tuple(map(_storable_completion, group.rollout.completions))
    rollout = replace(group.rollout, item=item, completions=completions, **_texts(group.rollout, "generator"))
    errors, ungradable = (
        {sample: _text(text) for sample, text in some.items()} for some in (group.errors, group.ungradable)
    )
    return replace(group, rollout=rollout, errors=errors, ungradable=ungradable)


def _storable_completion(completion: Completion) -> Completion:
    fields: dict[str, Any] = _texts(completion, "text", "finish_reason")
    if isinstance(completion, Episode):
        numbers = {_text(name): _float(value) for name, value in completion.metrics.items()}
        per_turn = tuple(map(_float, completion.turn_rewards or ()))
        fields |= _texts(completion, "status", "error")
        fields["metrics"] = {name: value for name, value in numbers.items() if value is not None}
        fields["reward"], fields["seconds"] = _float(completion.reward), _float(completion.seconds)
        is_whole = completion.turn_rewards is not None and None not in per_turn
        fields["turn_rewards"] = per_turn if is_whole else None
    return replace(completion, **fields)


def _texts(message: object, *names: str) -> dict[str, Any]:
    return {name: _text(getattr(message, name)) for name in names}


def _text(value: object) -> str:
    try:
        return encodable(str(value))
    except Exception:
        return ""


def _float(value: Any) -> float | None:
    try:
        return float(value)
    except Exception:
        return None
