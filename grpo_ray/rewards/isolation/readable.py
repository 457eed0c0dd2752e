"""The files that a worker may read: Python, its libraries, and the folders that modules come from.

Credentials lie elsewhere: in hidden files of the home or of a project, in /etc, /root and /proc.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

SYSTEM = (
    "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local/lib", "/usr/share", "/lib", "/lib64", "/nix/store",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
    "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/sys/devices/system/cpu",
)  # fmt: skip
LIBRARIES = ("lib", "lib64", "share", "pyvenv.cfg")  # below a prefix of Python
MODULES = (".py", ".pyc", ".so")


def readable_paths(extra: Sequence[str] = ()) -> list[str]:
    """Return the files and folders that this process's modules, imported or not, need.

    Args:
        extra: more of them (`scorer.readable_paths`).

    Raises:
        ValueError: one of `extra` does not exist.
    """
    check_exist(extra, "scorer.readable_paths")
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}
    libraries = [os.path.join(prefix, name) for prefix in prefixes for name in LIBRARIES]
    linked = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    whole = {os.path.realpath(path) for path in (*SYSTEM, *libraries, *linked, *_packages(), *extra)}
    visible = [
        path for folder in listable_folders() if not _is_in(folder, whole) for path in _visible(Path(folder))
    ]
    return sorted({*whole, *visible})


def listable_folders() -> list[str]:
    """Return the folders in which Python looks for modules; it lists them."""
    return sorted({os.path.realpath(path or os.curdir) for path in sys.path})


def check_exist(paths: Iterable[str], field: str) -> None:
    """Refuse paths of a field that do not exist, by a ValueError."""
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"{field}: there is no {path!r}; give files and folders that exist")


def _packages() -> Iterator[str]:
    """Yield where the imported top-level modules are: an import hook may find some outside sys.path."""
    for name, module in [*sys.modules.items()]:
        if "." not in name:
            paths = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
            yield from (path for path in paths if isinstance(path, str) and os.path.exists(path))


def _visible(folder: Path) -> Iterator[str]:
    """Yield what is in a folder of modules except hidden entries; in the home and above it, modules alone."""
    try:
        entries = [*os.scandir(folder)]
    except NotADirectoryError:
        yield str(folder)  # a zip file
        return
    except OSError:  # Python finds no module there either
        return
    home = Path(os.path.realpath(Path.home()))
    is_home = folder == home or folder in home.parents
    for entry in entries:
        is_module = entry.name.endswith(MODULES) or os.path.exists(os.path.join(entry.path, "__init__.py"))
        if not entry.name.startswith(".") and (is_module or not is_home):
            yield os.path.realpath(entry.path)


def _is_in(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
