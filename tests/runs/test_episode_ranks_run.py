"""A whole run with episodes and a Learner of two ranks: real processes, real Ray."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_process import PROGRAM

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.ray, pytest.mark.campaign, pytest.mark.usefixtures("model_cache")]


def test_episodes_train_on_two_ranks_and_the_workers_are_quiet(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    overrides = ["learner.num_ranks=2", "episodes.confined=true", "episodes.num_workers=2"]
    overrides += [f"run.output_dir={tmp_path}", "run.name=run"]
    ended = subprocess.run(
        [sys.executable, PROGRAM, "train", "tests/small_episodes.yaml", *overrides],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.getcwd()])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "EnvironmentWorker x2" in " ".join(ended.stdout.split())
    assert audit(run, run_reward_code=True).problems == []
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 4
    assert any(row["optim/grad_norm"] for row in rows)
    # Every actor answers with its stage times, also the confined ones.
    assert all({"time/environment-0/play_s", "timing/generate_s"} <= row.keys() for row in rows[1:])
    assert not run.events_path.exists()
    for name in ("environment-0", "environment-1"):
        assert "Traceback" not in (run.logs / f"{name}.log").read_text()
