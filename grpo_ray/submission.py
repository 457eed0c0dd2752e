"""What is submitted to a Ray cluster for a run: a command, the files it needs, a few environment variables."""

import math
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_ray.config import Config
from grpo_ray.config_loading import load_config
from grpo_ray.environment import is_secret
from grpo_ray.errors import RunError

# Ray uploads the working directory, for everybody with the cluster's token to read: without this (and what
# .gitignore names), gigabytes of environment, other runs, and keys.
EXCLUDED = (
    "/.git/", "/.venv/", "/venv/", "/runs/", "/experiments/", "/evaluations/", "/playground/", "/site/",
    "/wandb/", "/mlruns/",
    "__pycache__/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".hypothesis/",
    ".env*", "*.pem", "*.key", ".netrc", "auth_token",
)  # fmt: skip

# Settings that mean the same on the cluster. Everything else of this shell stays here unless it is named.
SENT_ALONG = (
    "GRPO_RAY_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL",
    "NCCL_DEBUG", "WANDB_MODE", "MLFLOW_TRACKING_URI",
)  # fmt: skip

# After the time that a run may take for its last checkpoint: to end its actors. Ray itself would wait 3 s.
TIME_TO_END_S = 30


@dataclass(frozen=True)
class Submission:
    """A job as Ray's job API takes it."""

    command: tuple[str, ...]
    """A program and its arguments, run on the cluster in the copy of the working directory."""
    runtime_env: Mapping[str, Any]
    """`working_dir`, `excludes` and `env_vars`."""
    metadata: Mapping[str, str]
    """`run`: the run's folder, absolute. `config`: the file that describes it."""
    warnings: tuple[str, ...] = ()

    @property
    def entrypoint(self) -> str:
        """The command for the shell that Ray hands it to: every word arrives as it is."""
        return shlex.join(self.command)


@dataclass(frozen=True)
class Circumstances:
    """Where a job comes from and goes to."""

    address: str
    """The dashboard's, such as http://127.0.0.1:8265."""
    folder: Path
    """The working directory, which is uploaded."""
    python: str | None = None
    """The cluster's Python that has grpo_ray; None: this one if the cluster is this machine, else `python`."""
    env: Sequence[str] = ()
    """Further variables of this shell that the job gets."""

    @property
    def is_here(self) -> bool:
        """Whether the cluster is this machine."""
        return urlsplit(self.address).hostname in ("127.0.0.1", "localhost", "::1")

    @property
    def program(self) -> tuple[str, ...]:
        return (self.python or (sys.executable if self.is_here else "python"), "-m", "grpo_ray.cli")


def training_job(path: str, overrides: Sequence[str], where: Circumstances) -> Submission:
    """The job that trains the configuration in the file.

    Its run is named and its folder given in full, as the job runs in a copy of the working directory.

    Raises:
        RunError: the file is not in what is uploaded, or a variable is not set.
        ConfigError: the configuration is wrong.
    """
    config = load_config(path, overrides)
    name = config.run.name or f"{Path(path).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    output_dir = (where.folder / config.run.output_dir).resolve()
    settled = (f"run.output_dir={output_dir}", f"run.name={name}")
    return _job(
        ("train", _name_there(path, where), *overrides, *settled), config, output_dir / name, path, where
    )


def resumption_job(run: str, overrides: Sequence[str], where: Circumstances) -> Submission:
    """The job that goes on with the run in folder `run`, which the cluster must see under the same name.

    Raises:
        RunError: it is no run's folder, or a variable is not set.
        ConfigError: as `training_job`.
    """
    folder = (where.folder / run).resolve()
    path = folder / "config.yaml"
    if not path.exists():
        raise RunError(f"no run in {run}: it has no config.yaml; give a folder that `train` made")
    return _job(("resume", str(folder), *overrides), load_config(path, overrides), folder, str(path), where)


def _job(arguments: Sequence[str], config: Config, run: Path, path: str, where: Circumstances) -> Submission:
    variables, warnings = _variables(where.env, os.environ)
    # Stopped, a run finishes its step and writes a checkpoint; Ray would kill it after 3 seconds.
    patience_s = math.ceil(config.run.on_preemption_s) + TIME_TO_END_S
    runtime_env = {
        "working_dir": str(where.folder),
        "excludes": [*EXCLUDED, *_excluded_output(run.parent, where.folder)],
        "env_vars": {**variables, "RAY_JOB_STOP_WAIT_TIME_S": str(patience_s)},
    }
    return Submission(
        (*where.program, *arguments), runtime_env, {"run": str(run), "config": path}, tuple(warnings)
    )


def _name_there(path: str, where: Circumstances) -> str:
    """The file's name in the copy; one outside of the working directory can be read on this machine only."""
    file = (where.folder / path).resolve()
    if file.is_relative_to(where.folder.resolve()):
        return str(file.relative_to(where.folder.resolve()))
    if where.is_here:
        return str(file)
    raise RunError(
        f"{path}: only the working directory {where.folder} is sent to {where.address}, and this file is not "
        "in it; submit from the folder that holds it"
    )


def _excluded_output(output_dir: Path, folder: Path) -> list[str]:
    folder = folder.resolve()
    is_inside = output_dir != folder and output_dir.is_relative_to(folder)
    return [f"/{output_dir.relative_to(folder)}/"] if is_inside else []


def _variables(named: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Those of the allow-list and those named; and a warning for each that looks like a credential."""
    missing = [name for name in named if name not in environment]
    if missing:
        raise RunError(
            f"--env {missing[0]}: no such variable in this shell; export it, or leave the option out"
        )
    sent = {name: environment[name] for name in SENT_ALONG if name in environment}
    sent = {name: value for name, value in sent.items() if not is_secret(name, value)}
    sent |= {name: environment[name] for name in named}
    warnings = [
        f"{name} looks like a credential: everybody with the cluster's token can read it in the job's "
        "description; a file on the cluster (`hf auth login` there) is safer"
        for name in named
        if is_secret(name, environment[name])
    ]
    return sent, warnings
