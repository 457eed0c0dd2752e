"""Errors whose message is all a user needs: what is wrong, where, and what to do."""

import contextlib
from collections.abc import Iterator


class RunError(RuntimeError):
    """A run cannot start or go on. Shown without a traceback."""


@contextlib.contextmanager
def shown_plainly() -> Iterator[None]:
    """ValueErrors raised inside are about what the user gave us: show their message alone."""
    try:
        yield
    except ValueError as error:
        raise RunError(str(error)) from error
