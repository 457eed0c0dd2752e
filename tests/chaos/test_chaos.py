"""A short form of profiling/chaos.py: real actors, a few faults from a fixed seed, and a clean audit."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import QUICKSTART, SMALL


def chaos(folder: Path, kinds: str, num_faults: int, *overrides: str) -> list[dict[str, Any]]:
    """Run the tool on one seed; returns the outcome of each fault."""
    command = [sys.executable, "profiling/chaos.py", QUICKSTART, "--folder", str(folder), "--seed", "1"]
    command += ["--kinds", kinds, "--faults", str(num_faults), "--pause", "1", *overrides]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert result.returncode == 0, result.stdout + result.stderr  # 1 where an outcome is not as it must be
    audit = json.loads((folder / "seed-1" / "audit.json").read_text())
    assert audit["problems"] == []
    assert audit["num_steps"] > num_faults
    return [json.loads(line) for line in (folder / "seed-1" / "faults.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_RAY_CACHE", str(tmp_path / "models"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_real_actors_survives_five_faults_with_a_clean_audit(tmp_path: Path) -> None:
    kinds = {"fill_disk", "kill_generator", "kill_learner", "nan_gradient", "poison_reward"}
    # One Generator: tests/test_run_vllm.py kills one of two.
    records = chaos(tmp_path / "chaos", ",".join(sorted(kinds)), len(kinds), *SMALL, "learner.slowdown_s=0.05")
    assert {fault for record in records for fault in record["faults"]} == kinds
