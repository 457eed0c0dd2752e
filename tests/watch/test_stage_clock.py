"""The stage clock counts every second for exactly one stage."""

import threading

import pytest
from builders import Time

from grpo_ray.watch import stage_clock
from grpo_ray.watch.stage_clock import StageClock


def make(*stages: str) -> tuple[StageClock, Time]:
    time = Time(100.0)
    return StageClock(stages, "wait", time), time


def test_overlapping_stages_count_for_the_first_in_the_list_up_to_each_reading() -> None:
    clock, time = make("load", "generate")
    time.seconds += 8
    with clock.stage("generate"):
        time.seconds += 1
        with clock.stage("generate"), clock.stage("load"):
            time.seconds += 2
        time.seconds += 4
        times = clock.take()
        assert (times.seconds, times.wall_s) == ({"load": 2, "generate": 5, "wait": 8}, 15)
        time.seconds += 16
    with pytest.raises(ZeroDivisionError), clock.stage("load"):
        time.seconds += 1 // 0
    time.seconds += 32
    assert clock.take().seconds == {"load": 0, "generate": 16, "wait": 32}


def test_turns_are_consecutive_and_have_labels() -> None:
    clock, time = make("load", "generate")
    time.seconds += 1
    with clock.stage("generate", "version 1"):
        time.seconds += 2
        with clock.stage("load", "version 2"):
            time.seconds += 4
        with clock.stage("generate", "version 2"):
            time.seconds += 8
            first = clock.take().turns
            time.seconds += 16
    turns = [*first, *clock.take().turns]
    told = [(turn.name, round(turn.end - turn.start, 3), turn.label) for turn in turns]
    assert told == [
        ("wait", 1, ""),
        ("generate", 2, "version 1"),
        ("load", 4, "version 2"),
        ("generate", 8, "version 2"),
        ("generate", 16, "version 2"),  # split by the reading
    ]
    assert [turn.start for turn in turns[1:]] == [turn.end for turn in turns[:-1]]


def test_spans_are_whole_and_may_overlap() -> None:
    clock, time = make("generate")
    with clock.span("rollout", "group 1") as duration:
        time.seconds += 3
        with clock.span("rollout", "group 2"):
            time.seconds += 1
        (inner,) = clock.take().spans
    (outer,) = clock.take().spans
    assert (inner.label, outer.label) == ("group 2", "group 1")
    assert outer.end - outer.start == pytest.approx(4) == duration.seconds
    assert outer.start < inner.start


def test_a_block_knows_its_duration_whichever_stage_counted() -> None:
    clock, time = make("optimizer", "train")
    with clock.stage("train") as whole:
        time.seconds += 1
        with clock.stage("optimizer") as part:
            time.seconds += 2
    assert (whole.seconds, part.seconds) == (3, 2)
    assert clock.take().seconds == {"optimizer": 2, "train": 1, "wait": 0}


def test_the_callback_gets_every_turn() -> None:
    heard: list[str] = []
    clock = StageClock(("evaluate", "train"), "idle", on_turn=heard.append)
    with clock.stage("train"), clock.stage("evaluate"), clock.stage("train"):
        pass
    assert heard == ["train", "evaluate", "train", "idle"]


def test_unread_records_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_clock, "MAX_SPANS", 7)
    clock, time = make("a")
    for _ in range(12):
        with clock.stage("a"), clock.span("rollout"):
            time.seconds += 1
    times = clock.take()
    assert len(times.turns) == len(times.spans) == 7
    assert times.seconds["a"] == 12


def test_threads_count_each_second_once() -> None:
    """One thread trains, others write at the same time, and one reads."""
    clock = StageClock(("train", "write"), "wait")

    def write() -> None:
        for _ in range(200):
            with clock.stage("write"), clock.span("file"):
                pass

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    readings = []
    for _ in range(200):
        with clock.stage("train"):
            readings.append(clock.take())
    for thread in threads:
        thread.join()
    readings.append(clock.take())
    for times in readings:
        assert sum(times.seconds.values()) == pytest.approx(times.wall_s)
        assert sum(turn.end - turn.start for turn in times.turns) == pytest.approx(times.wall_s, abs=1e-3)
    assert sum(len(times.spans) for times in readings) == 4 * 200
