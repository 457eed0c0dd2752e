"""Landlock, the kernel's sandbox for unprivileged processes: the files that a worker may read, and no others.

Linux 5.13; https://docs.kernel.org/userspace-api/landlock.html. Later versions of it restrict more. What a
version lacks, seccomp.py denies as well.
"""

import ctypes
import os
import stat
from collections.abc import Iterable

from grpo_ray.rewards.isolation.readable import listable_folders, readable_paths
from grpo_ray.rewards.isolation.system_calls import call, forgo_privileges

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on every architecture
CREATE_RULESET_VERSION = 1
PATH_BENEATH = 1

READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
FILE_RIGHTS = 0b111 | 1 << 14  # what a rule for a file may allow: execute, write, read; truncate
NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by Landlock's version; 16 from the fifth on
NETWORK_RIGHTS = 0b11  # TCP: bind, connect; from version 4
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/host.conf")
SCOPES = 0b11  # abstract unix sockets, signals to processes outside; from version 6


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 without it."""
    try:
        return call("syscall", CREATE_RULESET, None, 0, CREATE_RULESET_VERSION)
    except OSError:
        return 0


class Ruleset:
    """The right to read what modules need and some other files; made once, and entered by each worker."""

    def __init__(self, readable: Iterable[str], version: int, is_offline: bool = True) -> None:
        """
        Args:
            readable: files, and folders with all that they hold, besides what modules need.
            version: of Landlock, at most the kernel's.
            is_offline: deny the network, and signals to other processes, as well.

        Raises:
            ValueError: one of `readable` does not exist.
            OSError: the kernel refuses the ruleset.
        """
        self.all_rights = (1 << NUM_FILE_RIGHTS.get(version, 16)) - 1
        handled = [self.all_rights]  # a handled right is denied unless a rule allows it
        if is_offline:
            handled += [NETWORK_RIGHTS] * (version >= 4) + [SCOPES] * (version >= 6)
        attributes = (ctypes.c_uint64 * len(handled))(*handled)
        networked = () if is_offline else filter(os.path.exists, NETWORK_FILES)
        paths = readable_paths([*readable, *networked])
        self._fd = call("syscall", CREATE_RULESET, attributes, ctypes.sizeof(attributes), 0)
        for path in paths:
            self.allow(path, READ_FILE | READ_FOLDER)
        for folder in listable_folders():
            self.allow(folder, READ_FOLDER)

    def allow(self, path: str, rights: int) -> None:
        """Allow `rights` for the file, or for the folder and all beneath it; ignore a path that is gone."""
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return
        try:
            if not stat.S_ISDIR(os.fstat(file).st_mode):
                rights &= FILE_RIGHTS
            if not rights:
                return
            # struct landlock_path_beneath_attr, which is packed: 64 bits of rights, 32 of the file's number
            rule = rights.to_bytes(8, "little") + file.to_bytes(4, "little")
            call("syscall", ADD_RULE, self._fd, PATH_BENEATH, rule, 0)
        finally:
            os.close(file)

    def enter(self) -> None:
        """Restrict this process, and those that it starts, for good.

        Raises:
            OSError: the kernel refuses.
        """
        forgo_privileges()
        call("syscall", RESTRICT_SELF, self._fd, 0)
        os.close(self._fd)
