"""Metrics of episodes: lengths and entropy are those of sampled tokens, and ends are counted by name."""

import io
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import check_names, make_completion, make_group, make_item, simple_group
from episode_groups import branched_episode, make_episode, make_episode_group, play, random_episode_group
from rich.console import Console

from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.segments import Segments
from grpo_ray.records.evaluation_summary import find_evaluation, summarise, summarise_groups, write_evaluation
from grpo_ray.records.readable_rollouts import readable_rollouts
from grpo_ray.tools.evaluation.responses import SCHEMA, ResponseFiles, read_outcomes
from grpo_ray.tools.evaluation.results import summary_table, write_examples
from grpo_ray.types import ScoredGroup
from grpo_ray.watch.batch_metrics import cut_metrics, rollout_metrics
from grpo_ray.watch.metrics_catalog import METRICS


def two_episodes() -> ScoredGroup:
    """Make a group of an episode of five sampled tokens and two of context, and of one without a turn."""
    metrics, error = {"guesses": 3.0, "rare": 7.0}, "Traceback\nE: boom\n"
    first = branched_episode((0, 1, 4), reward=1.0, seconds=2.0, metrics=metrics, text="12 low 14")
    second = make_episode(Segments(), None, status="environment_error", seconds=5.0, error=error)
    third = replace(first, status="truncated_turns", metrics={"guesses": 5.0}, finish_reason="length")
    return make_episode_group(0, [first, second, third])


def test_the_statuses_are_those_of_episodes() -> None:
    assert {f"episodes/status/{name}" for name in Status} == {n for n in METRICS if "/status/" in n}


def test_metrics_of_a_step() -> None:
    metrics = rollout_metrics([two_episodes()])
    assert metrics["policy/entropy"] == pytest.approx((0.5 + 1.5 + 0.25 + 0.75 + 2.0) / 5)
    assert metrics["rollout/response_tokens/mean"] == pytest.approx(10 / 3)
    assert metrics["rollout/response_tokens/max"] == 5
    assert metrics["rollout/truncated_frac"] == pytest.approx(1 / 3)
    episodes = {name: value for name, value in metrics.items() if name.startswith("episodes/")}
    shares = {f"episodes/status/{name}": 0.0 for name in Status}
    assert episodes == pytest.approx({
        **shares, "episodes/turns/mean": 2.0, "episodes/turns/max": 3.0, "episodes/branches/mean": 2 / 3,
        "episodes/context_tokens/mean": 4 / 3, "episodes/seconds/mean": 3.0, "episodes/seconds/max": 5.0,
        "episodes/status/finished": 1 / 3, "episodes/status/truncated_turns": 1 / 3,
        "episodes/status/environment_error": 1 / 3, "episodes/metrics/guesses": 4.0,
        "episodes/metrics/rare": 7.0,
    })  # fmt: skip
    assert check_names(metrics) == []


def test_groups_without_a_sampled_token_have_metrics() -> None:
    nothing = make_episode(Segments(), None, status="generator_error", error="died")
    group = make_episode_group(0, [nothing, nothing])
    metrics = rollout_metrics([group])
    assert "policy/entropy" not in metrics
    assert (metrics["rollout/response_tokens/max"], metrics["reward/errors"]) == (0, 2)
    assert cut_metrics([group]) == {}
    assert summarise_groups(3, [group]).version == 0
    assert readable_rollouts([group], 1)[0]["response"] == "(0 turns, generator_error: died)"


def test_context_counts_nowhere() -> None:
    """A context token's logprob of 0 and version of -1 are in no mean."""
    segments = Segments()
    play(segments, [1], [2], 3, [-1.0])
    play(segments, [1, 2, *[9] * 50], [3], 3, [-3.0])
    group = make_episode_group(0, [make_episode(segments, 1.0)])
    plain = make_group(make_item(), [make_completion([2, 3], [-1.0, -3.0], 3)], [1.0], [0.0])
    plain = replace(plain, format_rewards=plain.rewards)
    of_episodes, of_plain = rollout_metrics([group]), rollout_metrics([plain])
    assert {name: of_episodes[name] for name in of_plain} == of_plain
    summaries = [asdict(summarise_groups(3, groups)) for groups in ([group], [plain])]
    assert [summary.pop("episodes") != {} for summary in summaries] == [True, False]
    assert summaries[0] == summaries[1]


def test_readable_rollouts_say_how_an_episode_went() -> None:
    (first,) = readable_rollouts([two_episodes()], 1)
    assert first["response"] == "12 low 14\n(3 turns, 1 branch, finished)"


def test_a_validation_of_episodes_is_written_and_found(tmp_path: Path) -> None:
    groups = [two_episodes()]
    summary = summarise_groups(4, groups)
    assert (summary.version, summary.mean_response_tokens, summary.max_response_tokens) == (4, 10 / 3, 5)
    assert summary.episodes["episodes/turns/mean"] == 2.0
    assert summary.metrics["eval/episodes/metrics/guesses"] == 4.0
    assert check_names(summary.metrics) == []
    write_evaluation(tmp_path, summary, groups)
    assert find_evaluation(tmp_path, 4).metrics == summary.metrics


def test_an_evaluation_keeps_the_facts_of_episodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = [two_episodes(), *(random_episode_group(rng, number, 3) for number in range(1, 70))]
    files = ResponseFiles(tmp_path, list(range(70)))
    for group in groups:
        files.add(group)
    found = summarise(read_outcomes(files.join()))
    expected = summarise_groups(0, groups)
    assert found.episodes == pytest.approx(expected.episodes)
    assert found.mean_response_tokens == expected.mean_response_tokens
    write_examples(tmp_path / "examples.parquet", found, tmp_path / "examples.md")
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(summarise_groups(0, groups[:1])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "mean 2.0, most 3" in text
    for status in ("finished", "truncated_turns", "environment_error"):
        assert re.search(rf"^  {status} +33.3% of episodes", text, re.M)
    assert "mean guesses" in text
    examples = (tmp_path / "examples.md").read_text()
    assert re.search(r"tokens, ended by \w+, \d turns, \d branches, \w+$", examples, re.M)


def test_parts_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    ResponseFiles(tmp_path, [0, 64]).add(simple_group(0))
    part = tmp_path / "parts" / "00000.parquet"
    pq.write_table(pq.read_table(part).drop_columns(SCHEMA.names[SCHEMA.names.index("status") :]), part)
    again = ResponseFiles(tmp_path, [0, 64])
    assert again.done == {0}
    again.add(simple_group(64))
    joined = again.join()
    assert pq.read_schema(joined).equals(pa.schema(SCHEMA))
    assert summarise(read_outcomes(joined)).num_examples == 2
