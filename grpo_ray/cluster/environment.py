"""Environment of a local Ray: its access token, its private folder, and no credentials.

Every process of a local Ray inherits the environment of the one that starts it, and keeps it readable in
/proc for as long as it lives. Variables that look like credentials are removed first.
"""

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from grpo_ray.config.secrets import RAY_TOKEN, public_environment
from grpo_ray.errors import RunError


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
