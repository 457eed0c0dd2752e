"""Scripts of profiling/: cheap benchmarks write results to compare, and a short chaos run is clean."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from small_run import QUICKSTART, SMALL

CHEAP = ("adapter_memory", "agreement", "head_memory", "scale", "scoring", "weight_delta")


@pytest.fixture(scope="module")
def bench(profiling_script: Callable[[str], ModuleType]) -> ModuleType:
    return profiling_script("bench")


@pytest.fixture(scope="module")
def results(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of the cheap benchmarks, by name."""
    folder, found = tmp_path_factory.mktemp("results"), {}
    for name in CHEAP:
        path = folder / f"{name}.json"
        assert bench.main([name, "--quick", "--out", str(path)]) == 0
        found[name] = json.loads(path.read_text())
    return found


def test_benchmarks_are_listed_and_no_helpers(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed > {*CHEAP, "learner_step", "weight_sync"}
    assert not listed & {"results", "tiny_learner", "jobs"}


@pytest.mark.campaign
@pytest.mark.parametrize("name", CHEAP)
def test_a_result_names_its_machine_versions_and_seconds(name: str, results: dict[str, dict[str, Any]]) -> None:
    result = results[name]
    assert result["name"] == name
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["memory_gib"] > 0
    assert {"python", "torch", "ray", "transformers", "grpo_ray"} <= result["versions"].keys()
    assert result["arguments"] == {"rounds": None, "quick": True, "overrides": []}
    cases = [row["case"] for row in result["rows"]]
    assert len(cases) == len(set(cases)) >= 3
    for row in result["rows"]:
        assert row["seconds"]
        assert all(seconds > 0 for seconds in row["seconds"])
        assert row["baseline"] in cases


@pytest.mark.campaign
def test_log_probabilities_are_equal_where_both_round_alike(results: dict[str, dict[str, Any]]) -> None:
    usual, alone, wide = (row["facts"]["largest difference"] for row in results["agreement"]["rows"])
    assert max(usual, wide) < 1e-5
    assert alone == 0.0


def test_cases_take_turns_and_warm_up(bench: ModuleType) -> None:
    from benchmarks.results import take_turns

    order: list[str] = []
    seconds = take_turns({name: (lambda name=name: order.append(name)) for name in "ab"}, rounds=2)
    assert order == list("baabba")  # every second round the other way round
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def make_result(bench: ModuleType, seconds: dict[str, tuple[float, ...]], **changes: Any) -> Any:
    from benchmarks.results import Result, Row

    rows = [Row(name, values, "plain", 100, "tokens") for name, values in seconds.items()]
    fields: dict[str, Any] = {"name": "agreement", "time": "", "machine": {}, "versions": {}, "arguments": {}}
    return Result(**{**fields, **changes}, rows=rows)


def test_a_ratio_is_the_median_of_the_rounds_ratios(bench: ModuleType) -> None:
    # The machine slows down from round to round, and both with it.
    result = make_result(bench, {"plain": (1.0, 2.0, 10.0), "other": (2.0, 4.0, 20.0)})
    assert [result.ratio(row) for row in result.rows] == [1.0, 2.0]
    plain = result.rows[0]
    assert (plain.median_s, plain.quartiles_s) == (2.0, (1.5, 6.0))


def test_the_command_compares(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "before.json", tmp_path / "after.json"]
    before = {"plain": (1.0, 1.0, 1.0), "slow": (1.0,), "fast": (4.0,), "gone": (1.0,)}
    after = {"plain": (0.9, 1.0, 1.3), "slow": (3.0,), "fast": (2.0,), "new": (1.0,)}
    make_result(bench, before, versions={"torch": "1"}, machine={"cores": 2}).write(paths[0])
    make_result(bench, after, versions={"torch": "2"}, machine={"cores": 2, "load_average": 3}).write(paths[1])
    assert bench.main(["compare", *map(str, paths)]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("!")] == [
        "! versions: torch is 1 in the first, 2 in the second"
    ]
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line}
    assert lines["plain"][-3:] == ["no", "clear", "difference"]
    assert lines["slow"] == ["1", "s", "3", "s", "3.00", "3.00", "to", "3.00", "1.00,", "3.00", "slower"]
    assert lines["fast"][4:8] == ["0.50", "0.50", "to", "0.50"]
    assert lines["fast"][-1] == "faster"
    assert lines["new"] == ["only", "in", "the", "second"]
    assert lines["gone"] == ["not", "measured", "in", "both"]


def test_impossible_comparisons_and_measurements_are_refused(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    make_result(bench, {"plain": (1.0,)}).write(one)
    make_result(bench, {"plain": (1.0,)}, name="scoring").write(other)
    for arguments, expected in (
        (["compare", str(one), str(other)], "agreement and scoring are different benchmarks"),
        (["compare", str(one)], "takes two result files, not 1"),
        (["compare", str(one), str(tmp_path / "none.json")], "not a result that bench.py wrote"),
        (["overlap"], "'overlap' is not a benchmark; choose from adapter_memory, agreement, "),
        (["agreement", "model.dtype=float32"], "agreement takes no changes to the configuration"),
    ):
        assert bench.main(arguments) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.slow
def test_a_synthetic_run_is_as_training_would_leave_it(bench: ModuleType, tmp_path: Path) -> None:
    """Its audit is clean, its catalog complete, and only its first steps have files of their own."""
    from benchmarks.long_run import SMALL, SyntheticRun
    from builders import check_names

    from grpo_ray.config.loading import load_config
    from grpo_ray.records.run_files import read_metrics
    from grpo_ray.tools.audit.audit import audit

    changes = ["algorithm.num_steps=12", "generator.num_generators=3", "evaluation.every_num_steps=5"]
    config = load_config("configs/quickstart.yaml", [*SMALL, *changes])
    report = audit(SyntheticRun(config, tmp_path / "whole", num_whole_steps=12).write())
    assert report.is_clean, str(report)
    assert (report.num_steps, report.num_groups, report.num_evaluations) == (12, 48, 4)
    run = SyntheticRun(config, tmp_path / "linked", num_whole_steps=5).write()
    rows = read_metrics(run.metrics_path)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert check_names(rows[0].keys() - {"step"}) == []
    assert "time/generator-2/generate_s" in rows[0]
    assert len({path.stat().st_ino for path in run.rollouts.iterdir()}) == 5
    assert len(list(run.rollouts.iterdir())) == 12
    assert len(list(run.evaluations.glob("*.parquet"))) == 4


def chaos(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "profiling/chaos/chaos.py", QUICKSTART, "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("model_cache")
def test_a_run_of_real_actors_survives_faults_with_a_clean_audit(tmp_path: Path) -> None:
    kinds = {"damaged_checkpoint", "fill_disk", "kill_generator", "nan_gradient", "scorer_error", "torn_logs"}
    # One Generator: tests/runs/test_run_vllm.py kills one of two.
    more = ["generator.num_generators=1", "learner.slowdown_s=0.05"]
    once = ["--pause", "0.5", "--kinds", ",".join(sorted(kinds)), "--faults", str(len(kinds))]
    result = chaos(tmp_path, *once, *SMALL, *more)
    assert result.returncode == 0, result.stdout + result.stderr  # 1 where an outcome is not as it must be
    *faults, audited = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert {fault for record in faults for fault in record["faults"]} == kinds
    assert audited["problems"] == []
    assert audited["num_steps"] > len(kinds)


@pytest.mark.campaign
def test_the_tables_count_what_is_not_as_it_must_be(tmp_path: Path) -> None:
    same = {"scenario": "torch", "seed": 0, "commit": "abc", "step": 3, "what": "it", "seconds": 1.0}
    rows = [
        {**same, "faults": ["delay"], "outcome": "rode through", "wrong": []},
        {**same, "faults": ["kill_learner"], "outcome": "replaced", "wrong": []},
        {**same, "faults": ["delay", "kill_driver"], "outcome": "resumed", "wrong": ["7 was still there"]},
    ]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = chaos(tmp_path, "--faults", "0")
    assert result.returncode == 1, result.stderr
    assert "4 faults of 3 kinds, 2 not as they must be." in result.stdout
    assert "7 was still there" in result.stdout
