"""Console output: it is complete, and a line that cannot be written does not end a run."""

import io
import os
import re
import sys

import pytest
from rich.console import Console

from grpo_ray.config.loading import load_config
from grpo_ray.watch.console import RunConsole, banner, step_line
from grpo_ray.watch.metrics_catalog import SYNC


def test_a_log_on_a_full_disk_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    with RunConsole(num_steps=2) as console:
        console.status("training")
        console.warning("the disk is full [really]")
        console.print("a line")
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_a_reader_that_went_away_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)  # `grpo-ray train ... | head`
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with RunConsole(num_steps=2) as console:
            console.status("training")
            console.print("a line that is longer than any buffer " * 1000)


METRICS = dict.fromkeys(
    (
        "reward/mean", "lag/max", "loss/policy", "throughput/sampled_tokens_per_s", "timing/step_s",
        "timing/wait_for_batch_s", "timing/train_s", *SYNC,
    ),
    1.0,
)  # fmt: skip
IDLE = METRICS | {"throughput/sampled_tokens_per_s": 0.0, "timing/generate_s": 0.0}


def test_a_step_without_some_measurements_still_has_its_line() -> None:
    assert "entropy nan" in step_line(METRICS)
    assert "entropy 0.125" in step_line(METRICS | {"policy/entropy": 0.125})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_lines(monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    """Return what a run of two steps leaves on a terminal."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    with RunConsole(num_steps=2) as console:
        console.step(1, METRICS)
        console.step(2, IDLE)
    written = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    return [line for line in re.split(r"[\r\n]+", written) if line.startswith("step  ")]


def test_every_step_leaves_its_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_lines(monkeypatch, 80) == [
        "step    1/2  reward 1.000  lag 1  loss +1.0000  1 tok/s  1.00 s",
        "step    2/2  reward 1.000  lag 1  loss +1.0000  nothing left to sample  1.00 s",
    ]


def test_a_wide_terminal_has_room_for_the_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_lines(monkeypatch, 200) == [
        f"step    1/2  {step_line(METRICS)}",
        f"step    2/2  {step_line(IDLE, is_sampled=True)}",
    ]


@pytest.mark.parametrize(
    ("step", "max_lag", "is_shown"), [(9, 1, False), (10, 1, True), (9, 2, True), (10, 0, False)]
)
def test_only_the_last_steps_have_nothing_left_to_sample(
    step: int, max_lag: int, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    RunConsole(10, max_lag).step(step, IDLE)
    line = capsys.readouterr().out
    assert ("nothing left to sample" in line) == is_shown
    assert ("0 tok/s" in line) == ("generate 0.00" in line) == (not is_shown)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "float32 on CPU, 1 thread"),
        (["learner.num_ranks=2", "learner.num_threads=3"], "2 ranks, each float32 on CPU, 3 threads"),
        (["learner.num_ranks=4", "learner.replicas=2"], "4 ranks in 2 replicas, each float32 on CPU, 1 thread"),
    ],
)
def test_the_banner_has_the_learners_ranks(overrides: list[str], expected: str) -> None:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(banner(load_config("configs/quickstart.yaml", overrides), 12, "runs/x"))
    (line,) = [line for line in console.export_text().splitlines() if line.split()[0] == "Learner"]
    assert line.split(maxsplit=1)[1].strip() == expected
