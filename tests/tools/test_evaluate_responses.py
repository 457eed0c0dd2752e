"""The file of responses: written in parts, interrupted, resumed, and read back as numbers."""

import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import TinyModel, make_completion, make_group, make_item, make_settings, plain_rows
from torch import Tensor

from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.errors import RunError
from grpo_ray.learning.loading import load_policy
from grpo_ray.records.episode_metrics import FACTS
from grpo_ray.records.evaluation_summary import Category, outcomes_of, summarise
from grpo_ray.tools.evaluation.responses import (
    EXAMPLES_PER_PART,
    SCHEMA,
    ResponseFiles,
    read_outcomes,
    response_rows,
    sample_rows,
    table_outcomes,
)
from grpo_ray.tools.evaluation.results import read_summary
from grpo_ray.types import Completion, SamplingSettings, ScoredGroup


def graded(group_id: int) -> ScoredGroup:
    """Return a group of four responses, one of each category, with 1 to 4 tokens."""
    completions = [
        make_completion([7] * (sample + 1), text=f"{group_id}.{sample}", finish_reason=reason)
        for sample, reason in enumerate(("stop", "stop", "stop", "length"))
    ]
    group = make_group(make_item(group_id, truth=f"truth {group_id}"), completions, [1.0, 0.0, 0.0, 0.0])
    formats, answers = np.array([1, 1, 0, 0], np.float32), np.array([1, 0, 0, 0], np.float32)
    return replace(group, format_rewards=formats, answer_rewards=answers, errors={3: "it took too long"})


def written(folder: Path, num_examples: int) -> Path:
    """Write that many groups; return the joined file."""
    files = ResponseFiles(folder, range(num_examples))
    for example_id in range(num_examples):
        files.add(graded(example_id))
    return files.join()


def test_rows() -> None:
    rows = response_rows(graded(5))
    assert [row["category"] for row in rows] == ["correct", "wrong_answer", "no_format", "not_graded"]
    assert rows[3] == {
        "example_id": 5, "task": "", "prompt": "prompt 5", "ground_truth": "truth 5", "sample": 3,
        "response": "5.3", "num_tokens": 4, "finish_reason": "length", "reward": 0.0, "format_reward": 0.0,
        "answer_reward": 0.0, "category": "not_graded", "error": "it took too long", **dict.fromkeys(FACTS),
    }  # fmt: skip
    # A right answer in the wrong format, which rewards of the user's own can return, is no format.
    group = replace(graded(0), answer_rewards=np.array([1, 1, 1, 1], np.float32))
    assert [row["category"] for row in response_rows(group)][2] == Category.NO_FORMAT
    assert summarise(outcomes_of([group])).num_no_format == 1
    # An error has the least reward.
    groups = [replace(graded(0), rewards=graded(0).rewards - n) for n in (0, 1)]
    rewards = [summarise(outcomes_of([group])).reward for group in groups]
    assert rewards == [0.25, -0.75]  # (1 + 0 + 0 + 0) / 4, (0 - 1 - 1 - 1) / 4


def test_a_part_is_on_disk_once_it_is_complete_and_the_others_are_added_in_any_order(tmp_path: Path) -> None:
    ids = range(EXAMPLES_PER_PART + 20)
    first = ResponseFiles(tmp_path, ids)
    done = {*range(EXAMPLES_PER_PART), EXAMPLES_PER_PART + 3, EXAMPLES_PER_PART + 1}
    for example_id in done:
        first.add(graded(example_id))
    # The process may be killed with -9.
    assert pq.read_table(tmp_path / "parts" / "00000.parquet").num_rows == 4 * EXAMPLES_PER_PART
    assert ResponseFiles(tmp_path, ids).done == set(range(EXAMPLES_PER_PART))
    with pytest.raises(KeyError):  # each example once
        first.add(graded(EXAMPLES_PER_PART + 1))
    first.flush()
    second = ResponseFiles(tmp_path, ids)
    assert second.done == done
    for example_id in np.random.default_rng(0).permutation(sorted(set(ids) - done)):
        second.add(graded(int(example_id)))
    rows = pq.read_table(second.join()).to_pylist()
    second.remove_parts()
    assert [path.name for path in tmp_path.iterdir()] == ["examples.parquet"]
    assert rows == [row for example_id in ids for row in response_rows(graded(example_id))]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    ResponseFiles(tmp_path, range(1)).add(graded(0))
    (tmp_path / "parts/00000.parquet").write_bytes(b"")
    damaged = r"00000\.parquet: damaged \(.*\); remove it to sample its answers again"
    with pytest.raises(RunError, match=damaged):
        ResponseFiles(tmp_path, range(1))
    (tmp_path / "summary.json").write_text('{"summary": {"step": 1')
    with pytest.raises(RunError, match=r"summary\.json is damaged \(.*\); remove it to evaluate again"):
        read_summary(tmp_path)


def test_the_file_gives_the_same_summary_as_the_groups(tmp_path: Path) -> None:
    summary = summarise(read_outcomes(written(tmp_path, 70)))
    assert summary == summarise(outcomes_of([graded(example_id) for example_id in range(70)]))
    assert (summary.num_examples, summary.num_samples, summary.num_errors) == (70, 4, 70)
    assert (summary.mean_response_tokens, summary.median_response_tokens) == (2.5, 2.5)
    assert (summary.max_response_tokens, summary.truncated_frac) == (4, 0.25)


def test_a_long_error_costs_memory_once(tmp_path: Path) -> None:
    rows = [row for example_id in range(500) for row in response_rows(graded(example_id))]
    rows[3]["error"] = "x" * 20_000
    table = pa.Table.from_pylist(rows, SCHEMA)
    tracemalloc.start()
    outcomes = table_outcomes(table)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2_000_000  # 160 MB if every error took that much
    assert outcomes.is_error.tolist() == [[False, False, False, True]] * 500


def test_sampled_rows_have_the_category_and_are_reproducible(tmp_path: Path) -> None:
    path = written(tmp_path, 90)
    rows = sample_rows(path, Category.WRONG_ANSWER, 10)
    assert len({row["example_id"] for row in rows}) == 10
    assert {row["category"] for row in rows} == {"wrong_answer"}
    assert rows == sample_rows(path, Category.WRONG_ANSWER, 10)
    assert [row["example_id"] for row in rows] == sorted(row["example_id"] for row in rows)
    assert len(sample_rows(path, Category.CORRECT, 1000)) == 90


PROMPT = (40, 41, 42)


async def sample(config: Config, model_path: Path, settings: SamplingSettings) -> tuple[Completion, ...]:
    engine = make_engine(config, str(model_path), 64, 0)
    await engine.start(0)
    return await engine.generate(PROMPT, settings)


def rows_of(model_path: Path, completion: Completion, min_tokens: int = 0) -> list[Tensor]:
    model = load_policy(str(model_path))
    with torch.inference_mode():
        return plain_rows(model, PROMPT, completion.token_ids.tolist(), 1.0, min_tokens, (0, 17))


async def test_temperature_0_samples_the_most_likely_token(tiny_config: Config, tiny_model: TinyModel) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 12, "min_tokens": 3, "end_token_ids": (0, 17)}
    (completion,) = await sample(tiny_config, tiny_model(), make_settings(**greedy, seed=1))
    rows = rows_of(tiny_model(), completion, min_tokens=3)
    assert completion.token_ids.tolist() == [int(row.argmax()) for row in rows]
    assert completion.logprobs.tolist() == [0.0] * len(rows)
    (again,) = await sample(tiny_config, tiny_model(), make_settings(**greedy, seed=2))
    assert again.token_ids.tolist() == completion.token_ids.tolist()


@pytest.mark.slow
async def test_top_p_samples_only_from_the_nucleus(tiny_config: Config, tiny_model: TinyModel) -> None:
    settings = make_settings(num_samples=2000, top_p=0.2, max_tokens=1, seed=3)
    completions = await sample(tiny_config, tiny_model(), settings)
    first, drawn = completions[0], Counter(int(completion.token_ids[0]) for completion in completions)
    (row,) = rows_of(tiny_model(), first)
    probabilities, tokens = row.exp().sort(descending=True)
    size = int((probabilities.cumsum(0) < 0.2).sum()) + 1
    assert 1 < size < 100
    assert set(drawn) <= set(tokens[:size].tolist())
    mass = float(probabilities[:size].sum())
    assert drawn[int(tokens[0])] / 2000 == pytest.approx(float(probabilities[0]) / mass, abs=0.04)
    assert first.logprobs[0] == pytest.approx(float(row[int(first.token_ids[0])]) - math.log(mass), abs=1e-4)
