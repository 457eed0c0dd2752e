"""`examples.parquet`: one row per response, on disk soon after the response arrived.

    parts/00003.parquet     examples 192 to 255; after an interruption perhaps only some of them
    examples.parquet        all examples in order, once the evaluation is complete

Each file appears whole or not at all.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.dataset import dataset

from grpo_ray.errors import shown_plainly
from grpo_ray.records.durable import replacing
from grpo_ray.records.episode_columns import PLAIN
from grpo_ray.records.episode_metrics import FACTS, episode_facts
from grpo_ray.records.evaluation_summary import Category, Outcomes
from grpo_ray.records.rollout_log import damage_named
from grpo_ray.records.visible_text import encodable
from grpo_ray.types import Episode, PromptItem, ScoredGroup

EXAMPLES_PER_PART = 64

SCHEMA = pa.schema(
    [
        ("example_id", pa.int64()),  # index in the task's validation set
        ("task", pa.string()),  # the mixture part
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),
        ("sample", pa.int32()),
        ("response", pa.string()),
        ("num_tokens", pa.int32()),  # sampled ones
        ("finish_reason", pa.string()),  # "stop", or "length": truncated
        ("reward", pa.float64()),
        ("format_reward", pa.float64()),
        ("answer_reward", pa.float64()),
        ("category", pa.string()),  # a Category
        ("error", pa.string()),  # why it could not be graded; empty if it was
        # The facts of an episode; null in other responses.
        *((name, PLAIN[name]) for name in FACTS),
    ]
)
NUMBERS = ["example_id", "task", "sample", "num_tokens", "finish_reason", "category", "error"]
REWARDS = ["reward", "format_reward", "answer_reward"]

Row = dict[str, Any]


def category_of(rewards: Mapping[str, float], error: str) -> Category:
    if error:
        return Category.NOT_GRADED
    if rewards["format_reward"] <= 0:
        return Category.NO_FORMAT
    return Category.CORRECT if rewards["answer_reward"] > 0 else Category.WRONG_ANSWER


def make_row(
    item: PromptItem, sample: int, response: str, num_tokens: int, finish_reason: str,
    rewards: Mapping[str, float], error: str,
) -> Row:  # fmt: skip
    return {
        "example_id": item.group_id,
        "task": item.task,
        "prompt": item.prompt,
        "ground_truth": item.ground_truth,
        "sample": sample,
        "response": response,
        "num_tokens": num_tokens,
        "finish_reason": finish_reason,
        **{name: float(rewards[name]) for name in REWARDS},
        "category": category_of(rewards, error),
        "error": error,
        **dict.fromkeys(FACTS),
    }


def response_rows(group: ScoredGroup) -> list[Row]:
    """Return one row per response of the group."""
    columns = zip(group.rewards, group.format_rewards, group.answer_rewards, strict=True)
    rewards = [dict(zip(REWARDS, values, strict=True)) for values in columns]
    return [
        make_row(
            group.rollout.item, sample, encodable(c.text), c.num_tokens, c.finish_reason, rewards[sample],
            group.errors.get(sample, ""),
        ) | (episode_facts(c) if isinstance(c, Episode) else {})
        for sample, c in enumerate(group.rollout.completions)
    ]  # fmt: skip


class ResponseFiles:
    """Collects groups in any order, and keeps what an interrupted evaluation left in the folder.

    Only the parts that still lack an example are in memory: about as many as are being sampled.
    """

    def __init__(self, folder: Path, example_ids: Sequence[int]) -> None:
        """Read what is there; `example_ids` are all examples of the evaluation."""
        self._parts = folder / "parts"
        self._examples_path = folder / "examples.parquet"
        self._rows: dict[int, list[Row]] = {}  # by part, of incomplete parts
        self._missing: dict[int, set[int]] = {}
        for example_id in example_ids:
            self._missing.setdefault(example_id // EXAMPLES_PER_PART, set()).add(example_id)
        self.done: frozenset[int] = frozenset(self._read_parts())
        self._parts.mkdir(exist_ok=True)

    def _read_parts(self) -> Iterator[int]:
        """Yield the examples that are on disk already."""
        for part in list(self._missing):
            path = self._part_path(part)
            if path.exists():
                with shown_plainly(), damage_named(path, "damaged ({}); remove it to sample its answers again"):
                    rows = read_responses(path).to_pylist()
                done = {row["example_id"] for row in rows}
                self._missing[part] -= done
                if self._missing[part]:
                    self._rows[part] = rows
                yield from done

    def add(self, group: ScoredGroup) -> None:
        """Add a group, and write its part if that completes it.

        Raises:
            OSError: a full disk, for example; nothing is lost, and `flush` retries.
        """
        part = group.group_id // EXAMPLES_PER_PART
        self._missing[part].remove(group.group_id)
        self._rows.setdefault(part, []).extend(response_rows(group))
        if not self._missing[part]:
            self._write(part)

    def flush(self) -> None:
        """Write the incomplete parts too."""
        for part in list(self._rows):
            self._write(part)

    def join(self) -> Path:
        """Join all parts into one file in the order of the examples; return its path."""
        self.flush()
        with (
            replacing(self._examples_path) as partial,
            pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer,
        ):
            for part in sorted(self._missing):
                if self._part_path(part).exists():
                    writer.write_table(read_responses(self._part_path(part)))
        return self._examples_path

    def remove_parts(self) -> None:
        """Delete the parts, from which an interrupted evaluation resumes, once everything is written."""
        shutil.rmtree(self._parts)

    def _write(self, part: int) -> None:
        rows = sorted(self._rows[part], key=lambda row: (row["example_id"], row["sample"]))
        with replacing(self._part_path(part)) as partial:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), partial, compression="zstd")
        del self._rows[part]

    def _part_path(self, part: int) -> Path:
        return self._parts / f"{part:05d}.parquet"


def read_outcomes(path: Path) -> Outcomes:
    """Return the file's responses as arrays, without reading the long texts."""
    return table_outcomes(read_responses(path, [*NUMBERS, *REWARDS, *FACTS]))


def read_responses(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a file; columns that one of an earlier version lacks are null."""
    return pq.read_table(path, columns=columns, schema=SCHEMA)


def table_outcomes(table: pa.Table) -> Outcomes:
    """Return the rows as arrays; rows are ordered by example, then sample, with equally many samples each."""
    num_samples = 1 + pc.max(table["sample"]).as_py()
    episodes = table.select(FACTS).filter(pc.is_valid(table["status"])).to_pylist()

    def by_prompt(values: pa.ChunkedArray) -> np.ndarray:
        return np.asarray(values.to_numpy()).reshape(-1, num_samples)

    # Texts are compared in Arrow: in NumPy each would take as much memory as the longest.
    return Outcomes(
        rewards=by_prompt(table["reward"]),
        format_rewards=by_prompt(table["format_reward"]),
        answer_rewards=by_prompt(table["answer_reward"]),
        is_error=by_prompt(pc.not_equal(table["error"], "")),
        num_tokens=by_prompt(table["num_tokens"]),
        is_truncated=by_prompt(pc.equal(table["finish_reason"], "length")),
        tasks=by_prompt(table["task"])[:, 0],
        episodes=episodes,
    )


def sample_rows(path: Path, category: Category, num_rows: int) -> list[Row]:
    """Return random rows of the category, with a fixed seed and without replacement, in the file's order."""
    responses = dataset(path)
    categories = responses.to_table(columns=["category"])["category"].to_pylist()
    indices = [index for index, name in enumerate(categories) if name == category]
    chosen = np.random.default_rng(0).permutation(len(indices))[:num_rows]
    rows: list[Row] = responses.take(sorted(indices[number] for number in chosen), batch_size=256).to_pylist()
    return rows
