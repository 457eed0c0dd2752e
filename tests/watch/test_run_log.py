"""RunLog: warnings until they are cleared, events counted across processes; and the console."""

import io
import os
import re
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_runs import Recorder

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.watch.console import RunConsole, settings, step_line
from grpo_ray.watch.metrics_catalog import SYNC
from grpo_ray.watch.run_log import FAILURES, RunLog


@pytest.fixture
def display() -> Recorder:
    return Recorder()


@pytest.fixture
def log(tmp_path: Path, display: Recorder) -> RunLog:
    return RunLog(RunDirectory(tmp_path), display)


def test_a_warning_is_shown_after_every_step_until_it_is_cleared(log: RunLog, display: Recorder) -> None:
    log.warning("checkpoint", "no space for step 2")
    log.warning("rollouts", "no space for rollouts")
    assert display.take() == []  # after the step, not immediately
    for _ in range(2):
        log.show_warnings()
        assert display.take() == ["no space for step 2", "no space for rollouts"]
    log.warning("checkpoint", "no space for step 3")  # instead of the one before
    log.warning("rollouts", None)
    log.show_warnings()
    assert display.take() == ["no space for step 3"]
    log.warning("checkpoint", None)
    log.show_warnings()
    assert display.take() == []


def test_event_is_written_with_its_step_and_shown(log: RunLog, display: Recorder) -> None:
    log.step = 7
    before = time.time()
    log.event("set_aside", None, "group 9 waits", group_id=9)
    log.event("scorer_back", "scorer", "scores", seconds=1.5)
    log.event("generator_failed", "generator-1", "generator-1 died: killed")
    log.writer.call("waiting", str).result(5)
    first, second, third = read_metrics(log.run.events_path)
    assert before <= first.pop("time") <= second.pop("time") <= third.pop("time") <= time.time()
    assert first == {"kind": "set_aside", "actor": None, "step": 7, "text": "group 9 waits", "group_id": 9}
    assert second == {"kind": "scorer_back", "actor": "scorer", "step": 7, "text": "scores", "seconds": 1.5}
    assert display.take() == ["group 9 waits", "scorer: scores", "generator-1 died: killed"]


def test_events_of_earlier_processes_count(log: RunLog, display: Recorder) -> None:
    for kind in ("generator_failed", "set_aside", "generator_failed", "scorer_failed", "environment_failed"):
        log.event(kind, None, "?")
    log.writer.call("waiting", str).result(5)
    with log.run.events_path.open("a") as file:
        file.write('{"kind": "set_asi')  # killed while it wrote: not counted, and no part of the next event
    later = RunLog(log.run, display)
    assert later.num_events("generator_failed", "scorer_failed") == 3
    assert later.num_events(*FAILURES) == 4
    later.event("generator_failed", None, "?")
    assert later.num_events("generator_failed") == 3
    assert later.num_events("set_aside") == 1
    assert later.num_events("restored") == later.num_events() == 0
    later.writer.call("waiting", str).result(5)
    assert RunLog(log.run, display).num_events("generator_failed") == 3


def test_what_the_disk_refused_is_a_warning_until_it_is_retried_after_the_next_step(
    log: RunLog, display: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    paths = log.run.metrics_path, log.run.events_path
    with monkeypatch.context() as patch:
        patch.setattr("grpo_ray.records.json_lines._write_whole", full)
        log.line(1, {"reward/mean": 0.5})
        log.event("scorer_back", "scorer", "scores again")
        log.writer.call("waiting", str).result(5)
        display.take()
        log.show_warnings()
        error = "[Errno 28] No space left on device; 1 lines wait in memory"
        assert display.take() == [f"{path}: {error}" for path in paths]
        assert log.num_events("scorer_back") == 1
        log.writer.call("waiting", str).result(5)
    log.show_warnings()  # which retries without another line or event
    log.writer.call("waiting", str).result(5)
    display.take()
    log.show_warnings()
    assert display.take() == []
    assert read_metrics(paths[0]) == [{"step": 1, "reward/mean": 0.5}]
    assert [event["kind"] for event in read_metrics(paths[1])] == ["scorer_back"]


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


METRICS = dict.fromkeys((
    "reward/mean", "lag/max", "loss/policy", "throughput/sampled_tokens_per_s", "timing/step_s",
    "timing/wait_for_batch_s", "timing/train_s", *SYNC,
), 1.0)  # fmt: skip
IDLE = METRICS | {"throughput/sampled_tokens_per_s": 0.0, "timing/generate_s": 0.0}


def test_a_step_without_some_measurements_still_has_its_line() -> None:
    assert "entropy nan" in step_line(METRICS)
    assert "generate" not in step_line(METRICS)
    assert "(generate 0.50, wait" in step_line(METRICS | {"timing/generate_s": 0.5})
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


def test_a_step_leaves_a_line_on_a_terminal_and_a_whole_one_if_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_lines(monkeypatch, 80) == [
        "step    1/2  reward 1.000  lag 1  loss +1.0000  1 tok/s  1.00 s",
        "step    2/2  reward 1.000  lag 1  loss +1.0000  nothing left to sample  1.00 s",
    ]
    assert terminal_lines(monkeypatch, 200) == [
        f"step    1/2  {step_line(METRICS)}",
        f"step    2/2  {step_line(IDLE, is_sampled=True)}",
    ]


@pytest.mark.parametrize(("step", "lag", "shown"), [(9, 1, False), (10, 1, True), (9, 2, True), (10, 0, False)])
def test_only_the_last_steps_have_nothing_left_to_sample(
    step: int, lag: int, shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    RunConsole(10, max_lag=lag).step(step, IDLE)
    line = capsys.readouterr().out
    assert ("nothing left to sample" in line) == shown
    assert ("0 tok/s" in line) == ("generate 0.00" in line) == (not shown)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "float32 on CPU, 1 thread"),
        (["learner.num_ranks=2", "learner.num_threads=3"], "2 ranks, each float32 on CPU, 3 threads"),
        (["learner.num_ranks=4", "learner.replicas=2"], "4 ranks in 2 replicas, each float32 on CPU, 1 thread"),
    ],
)
def test_the_settings_have_the_learners_ranks(overrides: list[str], expected: str) -> None:
    shown = dict(settings(load_config("configs/quickstart.yaml", [*overrides, "model.tiny.warmup=null"])))
    assert (shown["Learner"], shown["model"]) == (expected, "tiny (built from the seed)")
