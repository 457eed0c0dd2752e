"""What a run prints, where it cannot be printed."""

import sys

import pytest

from grpo_ray.telemetry.console import RunConsole


def test_a_log_on_a_full_disk_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    with RunConsole(num_steps=2) as console:
        console.status("training")
        console.trouble("the disk is full [really]")
        console.print("a line")
    with pytest.raises(OSError, match="No space left"):
        full.close()
