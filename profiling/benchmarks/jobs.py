"""Whole runs, started as a user would."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_ray.records.run_files import RunDirectory


def train(
    name: str, overrides: Sequence[str], folder: Path, config: str = "configs/quickstart.yaml"
) -> RunDirectory:
    """Train a configuration with `overrides` through the command line; raises when it fails."""
    command = [sys.executable, "-m", "grpo_ray", "train", config, *overrides]
    command += [f"run.output_dir={folder}", f"run.name={name}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return RunDirectory(folder / name)
