"""Raw system calls, for which Python has no functions; no reader of GRPO needs this file."""

import ctypes
import os
from typing import Any

PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library and return its result.

    Raises:
        OSError: it returned -1.
    """
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
    return result


def forgo_privileges() -> None:
    """Gain no privilege by executing a program, which the kernel demands before a process restricts itself."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
