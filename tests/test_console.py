"""Console output: it is complete, and a line that cannot be written does not end a run."""

import io
import os
import sys

import pytest
from rich.console import Console

from grpo_ray.config.loading import load_config
from grpo_ray.telemetry.console import RunConsole, banner, step_line
from grpo_ray.telemetry.metrics_catalog import SYNC


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


def test_a_step_without_some_measurements_still_has_its_line() -> None:
    metrics = dict.fromkeys(
        (
            "reward/mean", "lag/max", "loss/policy", "throughput/sampled_tokens_per_s", "timing/step_s",
            "timing/wait_for_batch_s", "timing/train_s", *SYNC,
        ),
        1.0,
    )  # fmt: skip
    assert "entropy nan" in step_line(metrics)
    assert "entropy 0.125" in step_line(metrics | {"policy/entropy": 0.125})


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
