"""Commands of `grpo-ray` in this process: what they print, and how they refuse."""

from typing import Any

import pytest

from grpo_ray.tools.cli import main

Capture = pytest.CaptureFixture[str]


def printed(capsys: Capture, *words: object, status: int = 0) -> str:
    """Return the standard output of a command that ends with this status."""
    return _streams(capsys, words, status).out


def refused(capsys: Capture, *words: object, status: int = 2) -> str:
    """Return the standard error of a command that ends with this status."""
    return _streams(capsys, words, status).err


def _streams(capsys: Capture, words: tuple[object, ...], status: int) -> Any:
    capsys.readouterr()  # of earlier commands
    assert main([str(word) for word in words]) == status
    return capsys.readouterr()
