"""A short form of profiling/chaos/chaos.py: real actors, a few faults from a fixed seed, and a clean audit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import QUICKSTART, SMALL


def chaos(folder: Path, kinds: set[str], *overrides: str) -> list[dict[str, Any]]:
    """Run the tool on one scenario, with each kind once; returns its results."""
    command = [
        sys.executable,
        "profiling/chaos/chaos.py",
        QUICKSTART,
        "--folder",
        str(folder),
        "--pause",
        "0.5",
    ]
    command += ["--kinds", ",".join(sorted(kinds)), "--faults", str(len(kinds)), *overrides]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr  # 1 where an outcome is not as it must be
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_RAY_CACHE", str(tmp_path / "models"))


@pytest.mark.ray
@pytest.mark.campaign
def test_a_run_of_real_actors_survives_faults_with_a_clean_audit(tmp_path: Path) -> None:
    kinds = {"damaged_checkpoint", "fill_disk", "kill_generator", "nan_gradient", "scorer_error", "torn_logs"}
    # One Generator: tests/runs/test_run_vllm.py kills one of two.
    more = ["generator.num_generators=1", "learner.slowdown_s=0.05"]
    *faults, audited = chaos(tmp_path / "chaos", kinds, *SMALL, *more)
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
    command = [
        sys.executable,
        "profiling/chaos/chaos.py",
        QUICKSTART,
        "--folder",
        str(tmp_path),
        "--faults",
        "0",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "4 faults of 3 kinds, 2 not as they must be." in result.stdout
    assert "7 was still there" in result.stdout
