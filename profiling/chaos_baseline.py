"""Undisturbed runs, to compare the reward of a disturbed run with."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_ray.telemetry.run_files import RunDirectory, read_metrics

Rewards = dict[int, dict[str, Any]]  # by step, the evaluations' summaries


def run_baseline(folder: Path, config: str, overrides: Sequence[str], seed: int) -> Rewards:
    """Train as many steps as the longest disturbed run in the folder, unless that has been done already."""
    num_steps = max(max(rewards_of(path / "run")) for path in folder.glob("seed-*"))
    run = folder / f"baseline-seed-{seed}"
    if not run.exists():
        command = [sys.executable, "-m", "grpo_ray", "train", config, *overrides, f"run.seed={seed}"]
        command += [f"algorithm.num_steps={num_steps}", f"run.output_dir={folder}", f"run.name={run.name}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return rewards_of(run)


def rewards_of(run: Path) -> Rewards:
    return {row["step"]: row for row in read_metrics(RunDirectory(run).evaluations_summary_path)}


def compare(folder: Path, baselines: Sequence[Rewards]) -> None:
    """Compare the rewards at the last evaluation that all runs have; writes comparison.json.

    They may differ by three standard errors of the difference plus the spread between undisturbed seeds.
    """
    disturbed = rewards_of(folder / "run")
    step = max(set(disturbed).intersection(*baselines))
    reward, error = disturbed[step]["reward"], disturbed[step]["reward_standard_error"]
    others = [rewards[step]["reward"] for rewards in baselines]
    errors = [rewards[step]["reward_standard_error"] for rewards in baselines]
    mean = sum(others) / len(others)
    others_error = math.sqrt(sum(e**2 for e in errors)) / len(errors)
    allowed = 3 * math.hypot(error, others_error) + max(others) - min(others)
    facts = {
        "step": step,
        "reward": reward,
        "error": error,
        "others": f"{mean:.3f} ± {others_error:.3f} ({min(others):.3f} to {max(others):.3f})",
        "allowed": allowed,
        "is_within": abs(reward - mean) <= allowed,
    }
    (folder / "comparison.json").write_text(json.dumps(facts, indent=1))
    print(f"{folder.name}: reward {reward:.3f} ± {error:.3f} at step {step}; undisturbed {facts['others']}; "
          f"may differ by {allowed:.3f}", flush=True)  # fmt: skip
