"""A job for a Ray cluster: a command, a few environment variables, and files to upload, without credentials."""

import json
import math
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pathspec import GitIgnoreSpec, PathSpec

from grpo_ray.config import Config
from grpo_ray.config.loading import find_config, load_config
from grpo_ray.config.secrets import is_secret
from grpo_ray.errors import RunError
from grpo_ray.records.run_files import run_name
from grpo_ray.tasks.input_digests import files_named

# Ray uploads the working directory, and everyone with the cluster's token can read it. Without these patterns
# (and those in .gitignore) it would hold gigabytes of environment and other runs; a .git may hold a token, too.
EXCLUDED = (
    ".git/", "/.venv/", "/venv/", "/runs/", "/experiments/", "/evaluations/", "/playground/", "/site/",
    "/wandb/", "/mlruns/",
    "__pycache__/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".hypothesis/",
)  # fmt: skip

# Settings that mean the same on the cluster. All other variables of this shell stay here unless they are named.
SENT_ALONG = (
    "GRPO_RAY_CACHE", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL",
    "NCCL_DEBUG", "WANDB_MODE", "MLFLOW_TRACKING_URI",
)  # fmt: skip

LIMIT_BYTES = 100 * 2**20  # a head node's dashboard refuses larger requests
SHOWN = 10  # names of files that are left out

RUN_KEY = "run"  # in a job's metadata: its run's directory

# To end a run's actors, after the time that it may take for its last checkpoint. Ray itself would wait 3 s.
TIME_TO_END_S = 30
# As in a .gitignore, and in lower case; capitals are recognised, too.
CREDENTIALS = (
    ".ssh/", ".gnupg/", ".aws/", ".azure/", ".oci/", ".kube/", ".kaggle/", ".huggingface/", ".terraform.d/",
    "**/.config/gcloud/", "**/.config/gh/", "**/.docker/config.json", "**/huggingface/token",
    "**/huggingface/stored_tokens",
    ".env*", "*.env", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".yarnrc*", ".pypirc", ".pgpass",
    ".my.cnf", ".s3cfg", ".boto", ".dockercfg", ".vault-token", ".databrickscfg", ".htpasswd",
    "auth_token", ".auth_token",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk",
    "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "*.keytab",
    "*credentials*.json", "service-account*.json", "service_account*.json", "client_secret*.json",
    "kubeconfig", "kaggle.json", "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml",
)  # fmt: skip
HEAD_BYTES = 64 * 2**10
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|^PuTTY-User-Key-File-|^AGE-SECRET-KEY-1", re.M)
CLOUD_ACCOUNT = re.compile(rb'"type"\s*:\s*"(?:service_account|authorized_user)"')
ITS_SECRET = re.compile(rb'"(?:private_key|refresh_token)"\s*:')


@dataclass(frozen=True)
class Submission:
    """A job, as Ray's job API takes it."""

    command: tuple[str, ...]  # a program and its arguments, run in the cluster's copy of the working directory
    runtime_env: Mapping[str, Any]  # `working_dir`, `excludes` and `env_vars`
    metadata: Mapping[str, str]  # `run`: the run's directory, absolute; `config`: the file that describes it
    warnings: tuple[str, ...] = ()
    relative_files: Mapping[str, str] = field(default_factory=dict)
    """Paths relative to the working directory, by the field that names them, or CONFIG."""

    @property
    def entrypoint(self) -> str:
        """The command quoted for the shell that Ray hands it to."""
        return shlex.join(self.command)


@dataclass(frozen=True)
class SubmissionContext:
    """The cluster that a job goes to, and the parts of this machine that go with it."""

    address: str  # the dashboard's address, such as http://127.0.0.1:8265
    folder: Path  # the working directory, which is uploaded
    python: str | None = None
    """The cluster's Python that has grpo_ray; None: this one if the cluster is this machine, else `python`."""
    env: Sequence[str] = ()  # further variables of this shell for the job

    @property
    def is_here(self) -> bool:
        return urlsplit(self.address).hostname in ("127.0.0.1", "localhost", "::1")

    @property
    def program(self) -> tuple[str, ...]:
        return (self.python or (sys.executable if self.is_here else "python"), "-m", "grpo_ray")


def training_job(path: str, overrides: Sequence[str], context: SubmissionContext) -> Submission:
    """Return the job that trains the configuration in the file.

    The job runs in a copy of the working directory, so it gets the run's name and its absolute directory.

    Raises:
        RunError: the file is outside the working directory, or a variable or the name to resume is missing.
        ConfigError: the configuration is wrong.
    """
    config = load_config(path, overrides)
    name = run_name(config, str(find_config(path)))
    output_dir = (context.folder / config.run.output_dir).resolve()
    settled = (f"run.output_dir={_quoted(output_dir)}", f"run.name={_quoted(name)}")
    arguments = ("train", _path_on_cluster(path, context), *overrides, *settled)
    return _job(arguments, config, output_dir / name, path, context)


def resumption_job(run: str, overrides: Sequence[str], context: SubmissionContext) -> Submission:
    """Return the job that resumes the run in directory `run`, which the cluster must see under the same path.

    Raises:
        RunError: there is no run, or a variable is not set.
        ConfigError: an override is wrong.
    """
    folder = (context.folder / run).resolve()
    path = folder / "config.yaml"
    if not path.exists():
        raise RunError(f"no run in {run}: it has no config.yaml; give a directory that `train` created")
    return _job(("resume", str(folder), *overrides), load_config(path, overrides), folder, str(path), context)


def _job(
    arguments: Sequence[str], config: Config, run: Path, path: str, context: SubmissionContext
) -> Submission:
    listed = [name for name in config.secrets if name in os.environ]  # preparation refuses the others
    variables, warnings = _variables([*context.env, *listed])
    folder, excludes = context.folder.resolve(), list(EXCLUDED)
    if run.parent != folder and run.parent.is_relative_to(folder):
        excludes.append(f"{_pattern(run.parent.relative_to(folder))}/")
    left_out = find_credentials(context.folder, excludes)
    if left_out:
        names = ", ".join(map(str, left_out[:SHOWN]))
        more = f" and {len(left_out) - SHOWN} more" if len(left_out) > SHOWN else ""
        why = "not uploaded, because everyone with the cluster's token could read it"
        warnings.append(f"{why}: {names}{more}")
    # A stopped run finishes its step and writes a checkpoint; by default Ray would kill it after 3 seconds.
    patience_s = math.ceil(config.run.on_preemption_s) + TIME_TO_END_S
    runtime_env = {
        "working_dir": str(context.folder),
        "excludes": [*excludes, *CREDENTIALS, *map(_pattern, left_out)],
        "env_vars": {**variables, "RAY_JOB_STOP_WAIT_TIME_S": str(patience_s)},
    }
    named = {"CONFIG": arguments[1], **files_named(config)}
    return Submission(
        command=(*context.program, *arguments),
        runtime_env=runtime_env,
        metadata={RUN_KEY: str(run), "config": path},
        warnings=tuple(warnings),
        relative_files={field: name for field, name in named.items() if not Path(name).is_absolute()},
    )


def _pattern(path: Path) -> str:
    """Return a pattern of the path, in which a character with a meaning in patterns is left open."""
    return "/" + re.sub(r"[\\*?\[\]\s]", "?", path.as_posix())


def missing_here(config: Config, context: SubmissionContext) -> list[str]:
    """Return the absolute paths that this machine lacks and the cluster may have, each after its field.

    A `python` of its own means that the cluster may be another machine behind a tunnel, whatever its address.
    """
    if context.is_here and context.python is None:
        return []
    named = files_named(config).items()
    return [f"{field}: {name}" for field, name in named if Path(name).is_absolute() and not Path(name).exists()]


def _quoted(text: str | Path) -> str:
    """Quote an override's value so that YAML reads the same text back, also of `007` or `/a #b`."""
    return json.dumps(str(text), ensure_ascii=False)


def _path_on_cluster(path: str, context: SubmissionContext) -> str:
    """Return the file's name in the copy, or its absolute path on this machine.

    Raises:
        RunError: the file is outside the working directory, and the cluster is another machine.
    """
    file, folder = (context.folder / path).resolve(), context.folder.resolve()
    if file.is_relative_to(folder):
        return str(file.relative_to(folder))
    if context.is_here:
        return str(file)
    raise RunError(
        f"{path} is not in the working directory {context.folder}, and only that is sent to {context.address}; "
        "submit from the folder that holds it"
    )


def _variables(names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the allowed and the named variables, and a warning per named one that looks like a credential."""
    sent = {name: os.environ[name] for name in SENT_ALONG if name in os.environ}
    sent = {name: value for name, value in sent.items() if not is_secret(name, value)}
    warnings = []
    for name in dict.fromkeys(names):
        if name not in os.environ:
            raise RunError(f"--env {name}: no such variable in this shell; export it, or leave the option out")
        sent[name] = os.environ[name]
        if is_secret(name, sent[name]):
            warnings.append(
                f"{name} looks like a credential: everyone with the cluster's token can read it in the job's "
                "description; a file on the cluster (`hf auth login` there) is safer"
            )
    return sent, warnings


def check_upload(job: Submission) -> None:
    """Compare the files that Ray will upload with those that the job reads, and with Ray's limit.

    Raises:
        RunError: a file would not arrive, or the upload is too large.
    """
    folder = Path(job.runtime_env["working_dir"])
    sent = uploaded_files(folder, job.runtime_env["excludes"])
    for key, name in job.relative_files.items():
        path = Path(os.path.normpath(folder / name))
        read = [file for file in path.iterdir() if file.name[0] != "."] if path.is_dir() else [path]
        left = [file for file in read if file.is_file() and file not in sent]
        if left:
            raise RunError(
                f"{key}: {os.path.relpath(left[0], folder)} is not uploaded with the working directory: it is "
                "outside, or excluded by .gitignore, .rayignore or submit itself (docs/cluster.md). Move it, "
                "or give an absolute path that the cluster sees"
            )
    total = sum(sent.values())
    if total > LIMIT_BYTES:
        sizes: Counter[str] = Counter()
        for file, size in sent.items():
            sizes[file.relative_to(folder).parts[0]] += size
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in sizes.most_common(3))
        raise RunError(
            f"{folder}: {_mib(total)} would be uploaded, but Ray takes at most {_mib(LIMIT_BYTES)}; the "
            f"largest: {largest}. List in a .rayignore what should stay here, and give absolute paths on the "
            "cluster for what the run reads"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def uploaded_files(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Return the files that Ray uploads from the folder, with their sizes; it does not compress them.

    What stays is in `excludes`, and in each folder's .gitignore and .rayignore.

    Raises:
        RunError: a link leads to a folder that it lies in, so that there is no end of files.
    """
    names = [".gitignore", ".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1":  # as Ray's client decides
        names.remove(".gitignore")
    sizes: dict[Path, int] = {}

    def walk(path: Path, lists: list[tuple[Path, PathSpec[Any]]], above: frozenset[Path]) -> None:
        found = [path / name for name in names if (path / name).is_file()]
        texts = [file.read_text("utf-8", "replace") for file in found]
        lists = [*lists, *((path, PathSpec.from_lines("gitwildmatch", text.splitlines())) for text in texts)]
        # A folder's own lists count for itself, too, as ".": with `*`, Ray uploads nothing, whatever follows.
        if any(spec.match_file(path.relative_to(root).as_posix()) for root, spec in lists):
            return
        real = path.resolve()
        if path.is_dir():
            if real in above:
                raise RunError(f"{path} leads back into {real}, without an end; name it in .rayignore")
            for inner in path.iterdir():
                walk(inner, lists, above | {real})
        elif path.is_file():
            sizes[path] = path.stat().st_size

    walk(folder, [(folder, PathSpec.from_lines("gitwildmatch", excludes))], frozenset())
    return sizes


def find_credentials(folder: Path, excludes: Sequence[str]) -> list[Path]:
    """Return the files that look like credentials and that no pattern excludes, relative and sorted."""
    named = GitIgnoreSpec.from_lines(CREDENTIALS)
    return sorted(
        file.relative_to(folder)
        for file in uploaded_files(folder, excludes)
        if named.match_file(file.relative_to(folder).as_posix().lower()) or holds_credential(file)
    )


def holds_credential(file: Path) -> bool:
    """Return True for a private key, whatever its name, and for a Google account's key.

    A source or a page that quotes such a key is none: a file of keys begins with one, or with a certificate.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:  # neither can Ray read it
        return False
    if head.startswith((b"-----BEGIN ", b"Bag Attributes", b"PuTTY-", b"AGE-SECRET-", b"# created: ")):
        return bool(PRIVATE_KEY.search(head))
    return head.startswith(b"{") and bool(CLOUD_ACCOUNT.search(head) and ITS_SECRET.search(head))
