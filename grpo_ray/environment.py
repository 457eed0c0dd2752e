"""What other processes learn from this one's environment, and who may talk to a run's own Ray.

Every process of a local Ray inherits the environment of the one that starts it, and keeps it readable in
/proc for as long as it lives. What looks like a credential is taken out first.

As a program, `python -m grpo_ray.environment COMMAND ...` runs a command without credentials.
"""

import contextlib
import os
import re
import secrets
import stat
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from grpo_ray.errors import RunError

SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(?:API|ACCESS|PRIVATE)_?KEY|^AWS_", re.IGNORECASE
)
SECRET_VALUE = re.compile(r"://[^/?#\s@]+@")  # a URL with user:password@, or with a token for a user

RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# Settings and names of files: TOKENIZERS_PARALLELISM, HF_TOKEN_PATH, VLLM_MAX_BAD_WORDS_TOTAL_TOKENS.
SETTING = re.compile(r"^TOKENIZERS_|^HF_(?:HUB_DISABLE_IMPLICIT_TOKEN|\w*TOKENS?_PATH)$|^VLLM_(?!API_KEY)")
# What fetching a gated model takes, a proxy's password included.
HUB_ACCESS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy",
)  # fmt: skip

# What a Python that grades needs: to find itself, its libraries and the locale.
REWARD_NAMES = (
    "PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "OMP_NUM_THREADS",
)  # fmt: skip


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a credential, by its name or because its value is a URL with one."""
    if name in RAY_TOKEN:
        return False
    is_named_so = SECRET_NAME.search(name) and not SETTING.search(name)
    return bool(is_named_so or SECRET_VALUE.search(value))


def public_environment(environment: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """`environment` without its secrets, except for those named in `keep`."""
    return {name: value for name, value in environment.items() if name in keep or not is_secret(name, value)}


@contextlib.contextmanager
def without_secrets(keep: Collection[str] = ()) -> Iterator[None]:
    """Take the secrets out of `os.environ` while processes are started; put them back afterwards.

    Ray's raylet starts every worker, so what it did not inherit no actor has, whenever that is started.
    """
    public = public_environment(os.environ, keep)
    hidden = {name: value for name, value in os.environ.items() if name not in public}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def reward_environment() -> dict[str, str]:
    """The environment of the process that grades: an allow-list, because it reads what a policy wrote."""
    return {name: value for name, value in os.environ.items() if name in REWARD_NAMES or name.startswith("LC_")}


def enable_token_auth() -> None:
    """Give the Ray that this process is about to start a token of its own; call before `ray.init`.

    Ray turns token authentication on for a Ray that it starts, but takes the token from ~/.ray/auth_token,
    which it writes with the umask's permissions (0644 as a rule) and never changes. A token given by
    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH is kept; RAY_AUTH_MODE=disabled turns authentication off.

    The token stays in `os.environ`: Ray's processes read it there, and threads of a Ray that is shutting
    down still ask for it. The next Ray of this process has the same one.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if not any(os.environ.get(name) for name in RAY_TOKEN):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Here, because Ray is not needed to grade. Importing it has cached the token that was there before.
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

    AuthenticationTokenLoader.instance().reset_cache()


def private_ray_folder() -> str:
    """A folder for the sessions of a Ray of our own that no other user of the machine can enter.

    Ray makes folders that everybody may write to, with sockets and packages in them; by default in /tmp/ray.

    Raises:
        RunError: the folder exists, but is not this user's alone.
    """
    folder = Path(tempfile.gettempdir()) / f"grpo_ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not is_private:
        raise RunError(f"{folder}: must be a folder that only you can enter; remove it, or set another TMPDIR")
    return str(folder / "ray")  # one deeper, because Ray opens the folder that it is given to everybody


if __name__ == "__main__":
    os.execvpe(sys.argv[1], sys.argv[1:], public_environment(os.environ))
