"""RunLog: warnings until they are cleared, and events counted across the run's processes."""

import time
from pathlib import Path

import pytest
from local_runs import Recorder

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.watch.run_log import FAILURES, RunLog


def settle(log: RunLog) -> None:
    """Wait for the thread that writes."""
    assert log.writer.wait(5)


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
    log.event("set_aside", None, "group 9 is set aside", group_id=9)
    log.event("scorer_back", "scorer", "scores again", seconds=1.5)
    log.event("generator_failed", "generator-1", "generator-1 died: killed")
    settle(log)
    first, second, third = read_metrics(log.run.events_path)
    assert before <= first.pop("time") <= second.pop("time") <= third.pop("time") <= time.time()
    assert first == {
        "kind": "set_aside", "actor": None, "step": 7, "text": "group 9 is set aside", "group_id": 9
    }  # fmt: skip
    assert second == {
        "kind": "scorer_back", "actor": "scorer", "step": 7, "text": "scores again", "seconds": 1.5
    }  # fmt: skip
    assert display.take() == ["group 9 is set aside", "scorer: scores again", "generator-1 died: killed"]


def test_events_of_earlier_processes_count(log: RunLog, display: Recorder) -> None:
    for kind in ("generator_failed", "set_aside", "generator_failed", "scorer_failed", "environment_failed"):
        log.event(kind, None, "?")
    settle(log)
    with log.run.events_path.open("a") as file:
        file.write('{"kind": "set_asi')  # killed while it wrote: not counted, and no part of the next event
    later = RunLog(log.run, display)
    assert later.num_events("generator_failed", "scorer_failed") == 3
    assert later.num_events(*FAILURES) == 4
    later.event("generator_failed", None, "?")
    assert later.num_events("generator_failed") == 3
    assert later.num_events("set_aside") == 1
    assert later.num_events("restored") == later.num_events() == 0
    settle(later)
    assert RunLog(log.run, display).num_events("generator_failed") == 3


def test_what_the_disk_refused_is_a_warning_until_it_is_retried_after_the_next_step(
    log: RunLog, display: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    paths = log.run.metrics_path, log.run.events_path
    with monkeypatch.context() as patch:
        patch.setattr("grpo_ray.records.json_lines._write_whole", full)
        log.line(1, {"reward/mean": 0.5})
        log.event("scorer_back", "scorer", "scores again")
        settle(log)
        display.take()
        log.show_warnings()
        error = "[Errno 28] No space left on device; 1 lines wait in memory"
        assert display.take() == [f"{path}: {error}" for path in paths]
        assert log.num_events("scorer_back") == 1
        settle(log)
    log.show_warnings()  # which retries without another line or event
    settle(log)
    display.take()
    log.show_warnings()
    assert display.take() == []
    assert read_metrics(paths[0]) == [{"step": 1, "reward/mean": 0.5}]
    assert [event["kind"] for event in read_metrics(paths[1])] == ["scorer_back"]
