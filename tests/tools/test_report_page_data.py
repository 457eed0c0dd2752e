"""The data of the web page: bounded series, sampled rollouts, token texts and log-ratios."""

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from builders import TinyModel, changed, check_names, make_completion, make_group, make_item, plain_logprobs
from commands import Capture, refused
from report_runs import NEAR_DEFAULT, add_checkpoint, group, make_run

from grpo_ray.config import Config
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records.readable_rollouts import MAX_CHARACTERS
from grpo_ray.records.rollout_log import read_rollouts, write_rollouts
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.report import rollout_sample
from grpo_ray.tools.report.rollout_rows import MAX_TOKENS, TokenTexts, log_ratios, show_rollouts
from grpo_ray.tools.report.rollout_sample import sample_rollouts, step_files
from grpo_ray.tools.report.run_data import run_data
from grpo_ray.tools.report.series import PANELS, Panel, RankTotals, expanded, make_series, stage_times


def test_a_short_run_keeps_every_step_and_bins_have_means_largest_values_and_the_errors_of_means() -> None:
    short = [{"step": 1, "a": 1.5, "text": "x"}, {"step": 2, "a": None}, {"step": 3, "a": 2, "b": True}]
    series = make_series(short, len(short), {"a": {1: 0.25, 3: 0.5}}, max_points=3)
    assert (series.steps, series.bin_size) == ([1.0, 2.0, 3.0], 1)
    assert series.columns == {"a": [1.5, None, 2.0]}
    assert series.standard_errors == {"a": [0.25, None, 0.5]}
    rows = [{"step": step, "a": float(step), "lag/max": float(step)} for step in (1, 2, 3, 4, 5)]
    rows[1]["a"] = math.nan
    series = make_series(rows, len(rows), {"a": {1: 3.0, 2: 4.0, 3: 1.0}}, max_points=3)
    assert (series.steps, series.bin_size) == ([1.5, 3.5, 5.0], 2)
    assert series.columns == {"a": [1.0, 3.5, 5.0], "lag/max": [2.0, 4.0, 5.0]}
    assert series.standard_errors == {"a": [2.5, None, None]}  # sqrt(9 + 16) / 2; steps 4 and 5 have none
    # The rank that was the slowest most often.
    rows = [{"step": step, "ranks/slowest": slowest} for step, slowest in enumerate((3.0, 0.0, 3.0, 1.0), 1)]
    assert make_series(rows, 4, {}, max_points=1).columns == {"ranks/slowest": [3.0]}


def test_stages_of_every_actor_in_the_order_of_their_numbers() -> None:
    columns = {"time/learner/train_s": [1.0, None], "time/learner/wait_for_batch_s": [0.5, 1.0],
               "time/generator-10/generate_s": [2.0, 2.0], "time/generator-9/generate_s": [1.0, 1.0],
               "timing/step_s": [1.5, 1.0]}  # fmt: skip
    found = stage_times(columns)
    assert found == {
        "generator-9": {"generate": [1.0, 1.0]},
        "generator-10": {"generate": [2.0, 2.0]},
        "learner": {"train": [1.0, 0.0], "wait_for_batch": [0.5, 1.0]},
    }
    assert list(found) == ["generator-9", "generator-10", "learner"]
    assert stage_times({"timing/step_s": [1.0], "reward/mean": [1.0]}) == {}


def test_panels_show_metrics_that_exist_and_a_series_per_rank_in_their_order() -> None:
    assert check_names(m for panels in PANELS.values() for panel in panels for m, _ in panel.series) == []
    panel = Panel("Memory", "bytes", (("memory/learner-*_bytes", "learner-*"), ("a", "b")))
    names = [
        "memory/learner-10_bytes", "memory/learner-2_bytes", "memory/learner-2_device_peak_bytes",
        "memory/learner_bytes", "xmemory/learner-3_bytes",
    ]  # fmt: skip
    assert expanded(panel, names).series == (
        ("memory/learner-2_bytes", "learner-2"), ("memory/learner-10_bytes", "learner-10"), ("a", "b"),
    )  # fmt: skip
    assert expanded(panel, ["memory/learner_bytes"]).series == (("a", "b"),)
    (of_episodes,) = (panel for panel in PANELS["Episodes"] if panel.title.startswith("Metrics"))
    own = "episodes/metrics/"
    names = [f"{own}num_calls", f"{own}a", f"eval/{own}a", "episodes/turns/max"]
    assert expanded(of_episodes, names).series == ((f"{own}a", "a"), (f"{own}num_calls", "num_calls"))


def test_ranks_over_all_steps() -> None:
    totals = RankTotals()
    first = {
        "step": 1, "timing/step_s": 2.0, "ranks/slowest": 10.0, "ranks/learner-9/collectives_s": 0.5,
        "ranks/learner-10/collectives_s": 0.1, "memory/learner-9_bytes": 9.0, "memory/learner-10_bytes": 5.0,
        "memory/learner-10_device_peak_bytes": 70.0,
    }  # fmt: skip
    second = {
        "step": 2, "timing/step_s": 3.0, "ranks/slowest": 9.0, "ranks/learner-9/collectives_s": 0.2,
        "ranks/learner-10/collectives_s": None, "memory/learner-9_bytes": 8.0, "memory/learner-10_bytes": None,
        "memory/learner-10_device_peak_bytes": 60.0,
    }  # fmt: skip
    assert [totals.noted(row) for row in (first, second)] == [first, second]
    nine, ten = totals.rows()
    assert nine == {
        "name": "learner-9", "collectives_s": pytest.approx(0.35), "collectives_frac": pytest.approx(0.7 / 5),
        "slowest_frac": 0.5, "process_bytes": 9.0, "device_bytes": None,
    }  # fmt: skip
    assert ten == {
        "name": "learner-10", "collectives_s": 0.1, "collectives_frac": 0.05, "slowest_frac": 1.0,
        "process_bytes": 5.0, "device_bytes": 70.0,
    }  # fmt: skip


def test_files_are_in_order_and_replays_not_in_their_error(tmp_path: Path, tiny_config: Config) -> None:
    run = make_run(tmp_path / "run", tiny_config, num_steps=1)
    assert step_files(run).inspected[0].standard_error is None  # of one group
    groups = [make_group(make_item(i), [make_completion([5])], [reward]) for i, reward in enumerate([0, 1, 9])]
    write_rollouts(run.rollouts_path(1), 1, groups, uses=[1, 0, 2])
    (file,) = step_files(run).inspected
    assert (file.step, file.num_rollouts) == (1, 3)
    assert file.standard_error == pytest.approx(0.5)  # of 0 and 1: std 0.7071, over sqrt(2)
    for step in (999_999, 1_000_000):
        write_rollouts(run.rollouts_path(step), step, [group(step)])
    assert [file.step for file in step_files(run).inspected] == [1, 999_999, 1_000_000]


def test_a_long_run_is_reported_from_a_sample_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_sample, "MAX_FILES", 4)
    run = many_steps(tmp_path / "run", num_steps=10, size=3)
    (run.rollouts / ".step-000011.parquet.partial").touch()
    for step, values in {1: [0, 1], 4: [0, 0], 7: [1, 1], 10: [0, 0.5]}.items():
        groups = [make_group(make_item(i), [make_completion([5])], [value]) for i, value in enumerate(values)]
        write_rollouts(run.rollouts_path(step), step, groups)
    for step in {2, 3, 5, 6, 8, 9}:
        run.rollouts_path(step).write_bytes(b"no step outside the sample is opened")
    files = step_files(run)
    assert [file.step for file in files.inspected] == [1, 4, 7, 10]  # the first and the last are always there
    assert files.steps == list(range(1, 11))
    assert files.num_rollouts == 20  # an estimate: 2 of each file that was opened, in 10 steps
    errors = files.standard_errors()  # those of the nearest step
    assert [errors[step] for step in (1, 2, 9, 10)] == pytest.approx([0.5, 0.5, 0.25, 0.25])
    assert [errors[step] for step in (3, 4, 5, 6, 7, 8)] == [0] * 6
    data = run_data(run, "run")
    assert data["facts"]["rollouts"] == "about 20"
    assert {row["step"] for row in data["rollouts"]} == {1, 4, 7, 10}
    assert data["sample"] == {
        "num_rollouts": 20, "num_steps": 10, "num_sampled_steps": 4, "num_inspected_steps": 4, "seed": 0,
    }  # fmt: skip
    assert data == run_data(run, "run")


@pytest.mark.slow
def test_metrics_are_read_as_a_stream(tmp_path: Path, tiny_config: Config) -> None:
    """One bin of rows is in memory at a time: the whole file of a long run would take gigabytes."""
    run = make_run(tmp_path / "run", tiny_config, num_steps=1)
    with run.metrics_path.open("w") as file:
        for step in range(1, 1001):
            values = {f"time/generator-{index}/generate_s": step / 7 for index in range(60)}
            row = {"step": step, "timing/step_s": 1.0, "reward/mean": step / 1000, **values}
            file.write(json.dumps(row) + "\n")
    run_data(run, "run", "none", max_points=40, max_rollouts=1)  # imports what is needed
    tracemalloc.start()
    data = run_data(run, "run", "none", max_points=40, max_rollouts=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < run.metrics_path.stat().st_size / 2  # 2 MB
    series = data["series"][0]
    assert (len(series["steps"]), series["bin_size"]) == (40, 25)
    assert series["columns"]["reward/mean"][:2] == pytest.approx([13 / 1000, 38 / 1000], rel=1e-4)
    assert data["facts"]["training reward"] == "0.001 → 1.000"
    assert (data["facts"]["time in steps"], data["facts"]["steps"]) == ("16 min 40 s", "1,000")


def many_steps(folder: Path, num_steps: int, size: int) -> RunDirectory:
    steps = [[group(step, [f"{step}-{place}" for place in range(size)])] for step in range(num_steps)]
    return make_run(folder, NEAR_DEFAULT, num_steps, steps)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 8, 40])
def test_a_sample_is_bounded_seeded_and_spread_out(tmp_path: Path, limit: int) -> None:
    files = step_files(many_steps(tmp_path / "run", num_steps=9, size=7))
    sample = sample_rollouts(files, limit, seed=3)
    assert len(sample) == len({(row["step"], row["sample"]) for row in sample}) == limit
    assert all(row["response"] == f"{row['step'] - 1}-{row['sample']}" for row in sample)
    steps = sorted({row["step"] for row in sample})
    assert steps[-1] == 9
    assert limit < 8 or steps[0] == 1
    assert sample == sample_rollouts(files, limit, seed=3)
    assert limit > 39 or sample != sample_rollouts(files, limit, seed=4)


def test_a_small_run_is_shown_completely_with_the_files_rows(tmp_path: Path) -> None:
    run = many_steps(tmp_path / "run", num_steps=2, size=300)  # several batches of rows
    sample = sample_rollouts(step_files(run), limit=600, seed=0)
    assert sample == [row for step in (1, 2) for row in read_rollouts(run.rollouts_path(step))]
    assert all(row in sample for row in sample_rollouts(step_files(run), limit=50, seed=1))


def test_steps_outside_the_sample_are_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, read = step_files(many_steps(tmp_path / "run", num_steps=20, size=5)), []

    class Spy(pq.ParquetFile):
        def iter_batches(self, *args: Any, **options: Any) -> Any:
            read.append(options["columns"])
            return super().iter_batches(*args, **options)

        def read(self, *args: Any, **options: Any) -> Any:
            raise AssertionError("a whole file")

    monkeypatch.setattr(rollout_sample.pq, "ParquetFile", Spy)
    assert len(sample_rollouts(files, limit=12, seed=0)) == 12
    assert len(read) == 3


def test_token_texts_join_to_the_response(tiny_model: TinyModel) -> None:
    tokenizer = load_tokenizer(str(tiny_model()))
    texts = TokenTexts(tokenizer)
    for text in ["ascending </think> 12345", "é 漢字 \N{PILE OF POO}!", "a\n\n b"]:
        token_ids = tokenizer.encode(text)
        found = texts.of(token_ids)
        assert len(found) == len(token_ids)
        assert "".join(found) == text
    spread = tokenizer.encode("漢")
    assert len(spread) == 3
    assert texts.of(spread) == ["漢", "", ""]
    assert texts.of(tokenizer.encode("éab")[:3]) == ["é", "", "a"]
    assert texts.of(spread[:2]) == ["\N{REPLACEMENT CHARACTER}"] * 2
    assert texts.of([]) == []
    # Spaces that SentencePiece drops are kept.
    words = {3: "▁the", 4: "▁cat", 5: "s"}

    class Llama:
        def decode(self, token_ids: list[int], **_: Any) -> str:
            return "".join(words[token] for token in token_ids).replace("▁", " ").removeprefix(" ")

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return words[token_id]

    assert TokenTexts(Llama()).of([3, 4, 5]) == [" the", " cat", "s"]  # type: ignore[arg-type]


@torch.no_grad()
def test_log_ratios_are_checkpoint_minus_sampler(tiny_config: Config, tiny_model: TinyModel) -> None:
    config = changed(tiny_config, sampling={"temperature": 0.7, "min_tokens": 0})
    model = load_policy(str(tiny_model()))
    rows = [
        {"prompt_token_ids": [3, 4, 5], "token_ids": [7, 8, 9, 10], "logprobs": [-0.5, -1.0, None, -2.0]},
        {"prompt_token_ids": [6], "token_ids": [11, 12, 13], "logprobs": [-3.0] * 3},
    ]
    found = log_ratios(config, tiny_model(), rows)
    for row, ratio in zip(rows, found, strict=True):
        plain = plain_logprobs(model, row["prompt_token_ids"], row["token_ids"], 0.7).numpy()
        behaviour = [np.nan if value is None else value for value in row["logprobs"]]
        np.testing.assert_allclose(ratio, plain - behaviour, atol=1e-5)


@pytest.mark.slow
def test_rows_have_tokens_ratios_and_spans(tmp_path: Path, tiny_config: Config, tiny_model: TinyModel) -> None:
    run = make_run(tmp_path / "run", tiny_config, num_steps=3)
    add_checkpoint(run, 2, tiny_model())
    add_checkpoint(run, 3, tiny_model(tied=False))
    sample = sample_rollouts(step_files(run), 100, 0)
    by_choice = {choice: show_rollouts(run, sample, choice) for choice in (None, "last", "best", "step-000002")}
    assert [checkpoint for _, checkpoint, _ in by_choice.values()] == [
        "step-000003", "step-000003", "step-000002", "step-000002",
    ]  # fmt: skip
    expected = log_ratios(tiny_config, tiny_model(), sample)
    for row, ratio in zip(by_choice["step-000002"][0], expected, strict=True):
        assert row["ratios"] == pytest.approx(ratio.tolist(), abs=1e-3)
    row = by_choice["last"][0][-1]
    assert (row["spans"], row["logprobs"]) == ([[1, 0], [2, 2]], [-0.5] * 3)
    assert len(row["tokens"]) == 3
    rows, _, _ = show_rollouts(run, sample, "none")
    assert rows[0]["ratios"] is None
    (run.checkpoint_path(3) / "training" / "state.json").unlink()
    _, checkpoint, notices = show_rollouts(run, sample, "last")
    assert (checkpoint, "step-000003: " in notices[0]) == ("step-000002", True)


def test_long_texts_are_cut_visibly(tmp_path: Path, tiny_config: Config, tiny_model: TinyModel) -> None:
    long = group(0, ["x" * (MAX_CHARACTERS + 1234)], size=MAX_TOKENS + 7)
    run = make_run(tmp_path / "run", tiny_config, num_steps=1, steps=[[long]])
    add_checkpoint(run, 1, tiny_model())
    (row,), _, _ = show_rollouts(run, sample_rollouts(step_files(run), 1, 0), None)
    assert row["response"].endswith("x… (1,234 more characters)")
    assert row["num_tokens"] == MAX_TOKENS + 7
    assert len(row["tokens"]) == len(row["ratios"]) == MAX_TOKENS


@pytest.mark.slow
def test_what_is_missing_without_a_checkpoint_or_settings_or_with_large_weights_is_a_notice(
    tmp_path: Path, tiny_config: Config, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run = make_run(tmp_path / "run", tiny_config)
    data = run_data(run, "run")
    assert data["checkpoint"] is None
    assert "tokens" not in data["rollouts"][0]
    assert data["notices"] == [
        f"no log-ratios: {run.path} has no checkpoint yet",
        "responses are not split into tokens: no tokenizer of the run can be loaded",
    ]
    add_checkpoint(run, 6, tiny_model())
    sample = sample_rollouts(step_files(run), 10, 0)
    with monkeypatch.context() as patch:
        patch.setattr("grpo_ray.tools.report.rollout_rows.SMALL_WEIGHTS_BYTES", 10)
        rows, checkpoint, notices = show_rollouts(run, sample, None)
        assert show_rollouts(run, sample, "last")[1] == "step-000006"
    assert checkpoint is None
    assert "request them with --log-ratio last" in notices[0]
    assert rows[0]["tokens"]
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace("  advantage_eps:", "  key_of_an_old_version:"))
    data = run_data(run, "run")
    assert data["notices"][0].startswith("no settings: ")
    assert "key_of_an_old_version: unknown key" in data["notices"][0]
    assert (data["changed"], "task" in data["about"]) == ([], False)
    assert data["rollouts"][0]["tokens"]
    assert "algorithm.key_of_an_old_version" in data["config"]
    unknown = f"--log-ratio: {run.path} has no checkpoint 'initial'; give last, best, none, or one of"
    for choice, message in {"last": "key_of_an_old_version: unknown key", "initial": unknown}.items():
        assert message in refused(capsys, "report", run.path, "--log-ratio", choice)
    run.config_path.write_text("algorithm: [1]\nbuffer:\n")
    assert "algorithm: [1] is not valid" in run_data(run, "run")["notices"][0]
