"""What is submitted to a Ray cluster for a run: a command, the files it needs, a few environment variables."""

import json
import logging
import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.schema import leaves
from grpo_ray.config.secrets import is_secret
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

# The fields of `model` and `task` that may name a file.
FILE_FIELDS = ("path", "train_path", "validation_path", "keywords_path", "prompt")

RUN_KEY = "run"  # in a job's metadata: where its run is

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
    files: Mapping[str, str] = field(default_factory=dict)
    """Who names which file or folder relative to the working directory: a field, or CONFIG."""

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
        return (self.python or (sys.executable if self.is_here else "python"), "-m", "grpo_ray")


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
    settled = (f"run.output_dir={_quoted(output_dir)}", f"run.name={_quoted(name)}")
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


def check_sent(job: Submission) -> None:
    """Compare what Ray will upload with what the job reads, and with what Ray takes; call after `check_token`.

    Raises:
        RunError: a file would stay here, or it is too much.
    """
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE

    folder = Path(job.runtime_env["working_dir"])
    sent = _sent(folder, job.runtime_env["excludes"])
    for who, name in job.files.items():
        path = Path(os.path.normpath(folder / name))
        read = [file for file in path.iterdir() if file.name[0] != "."] if path.is_dir() else [path]
        left = [file for file in read if file.is_file() and file not in sent]
        if left:
            raise RunError(
                f"{who}: {os.path.relpath(left[0], folder)} is not uploaded with the working directory: it is "
                "outside of it, or left out by .gitignore, .rayignore or submit itself (docs/cluster.md); move "
                "it, or give an absolute path that the cluster sees"
            )
    total, most = sum(sent.values()), DASHBOARD_CLIENT_MAX_SIZE
    if total > most:
        sizes: Counter[str] = Counter()
        for file, size in sent.items():
            sizes[file.relative_to(folder).parts[0]] += size
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in sizes.most_common(3))
        raise RunError(
            f"{folder}: {_mib(total)} would be uploaded, and Ray takes {_mib(most)}; the largest: {largest}. "
            "Name in a .rayignore what is to stay here, and what the run reads of it by an absolute path that "
            "the cluster sees"
        )


def _sent(folder: Path, excluded: Sequence[str]) -> dict[Path, int]:
    """The files that Ray's own packaging takes, and their sizes in bytes; it does not compress them."""
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    sizes: dict[Path, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path] = path.stat().st_size

    with_gitignore = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") != "1"  # as Ray's client decides
    rules = [_get_excludes(folder, list(excluded))]
    _dir_travel(folder, rules, note, with_gitignore, logger=logging.getLogger(__name__))
    return sizes


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def _job(arguments: Sequence[str], config: Config, run: Path, path: str, where: Circumstances) -> Submission:
    variables, warnings = _variables(where.env, os.environ)
    # Stopped, a run finishes its step and writes a checkpoint; Ray would kill it after 3 seconds.
    patience_s = math.ceil(config.run.on_preemption_s) + TIME_TO_END_S
    runtime_env = {
        "working_dir": str(where.folder),
        "excludes": [*EXCLUDED, *_excluded_output(run.parent, where.folder)],
        "env_vars": {**variables, "RAY_JOB_STOP_WAIT_TIME_S": str(patience_s)},
    }
    named = {"CONFIG": arguments[1], **_files_named(config)}
    return Submission(
        command=(*where.program, *arguments),
        runtime_env=runtime_env,
        metadata={RUN_KEY: str(run), "config": path},
        warnings=tuple(warnings),
        files={who: name for who, name in named.items() if not Path(name).is_absolute()},
    )


def files_only_there(config: Config, where: Circumstances) -> list[str]:
    """The absolute paths that this machine lacks and another may have, each with its field before it.

    With a Python of its own the cluster may be elsewhere behind a tunnel, whatever its address.
    """
    if where.is_here and where.python is None:
        return []
    named = _files_named(config).items()
    return [f"{who}: {name}" for who, name in named if Path(name).is_absolute() and not Path(name).exists()]


def _files_named(config: Config) -> dict[str, str]:
    """What may be a file, by its field; a hub's model or a template's name is none that is there."""
    values = leaves(config.model_dump(include={"model", "task"}))
    return {k: v for k, v in values.items() if v is not None and k.rpartition(".")[2] in FILE_FIELDS}


def _quoted(text: str | Path) -> str:
    """As an override's value that YAML reads back as the same text, be it `007` or `/a #b`."""
    return json.dumps(str(text), ensure_ascii=False)


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
