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

from grpo_ray.cluster.ray_internals import forget_cached_token
from grpo_ray.config.secrets import RAY_TOKEN, public_environment
from grpo_ray.errors import RunError


@contextlib.contextmanager
def without_secrets(keep: Collection[str] = ()) -> Iterator[None]:
    """Remove the secrets from `os.environ` while processes are started; restore them afterwards.

    Ray's raylet starts every worker, so no actor ever sees a variable that the raylet did not inherit.
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
    """Set an access token for the Ray that this process is about to start; call it before `ray.init`.

    Ray turns token authentication on for a local Ray, but takes the token from ~/.ray/auth_token, which it
    writes with the umask's permissions (usually 0644) and never changes. A token given by RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH is kept; RAY_AUTH_MODE=disabled turns authentication off.

    The token stays in `os.environ`: Ray's processes read it there, and so do threads of a Ray that is shutting
    down. The next Ray of this process has the same one.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    if not any(os.environ.get(name) for name in RAY_TOKEN):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    forget_cached_token()


def private_ray_folder() -> str:
    """Return a folder for the sessions of a local Ray that no other user of the machine can enter.

    Ray makes world-writable folders with sockets and packages in them, by default in /tmp/ray.

    Raises:
        RunError: the folder exists, but other users can enter it.
    """
    folder = Path(tempfile.gettempdir()) / f"grpo_ray-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid != os.getuid() or not is_private:
        raise RunError(f"{folder}: must be a folder that only you can enter; remove it, or set another TMPDIR")
    return str(folder / "ray")  # one deeper, because Ray makes the folder that it is given world-writable
