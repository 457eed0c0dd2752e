"""Open calls and their ages, by a clock that the test sets."""

import pytest

from grpo_ray.watch.open_calls import OpenCalls


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def calls(clock: Clock) -> OpenCalls:
    return OpenCalls(clock)


def test_every_answer_is_progress(clock: Clock, calls: OpenCalls) -> None:
    clock.now += 7
    assert calls.quiet_s == 7
    with calls.call("learner", "trains version 1"):
        clock.now += 5
        assert calls.quiet_s == 12  # a new call is no progress
    assert calls.quiet_s == 0
    clock.now += 3
    calls.progress()
    assert calls.quiet_s == 0


def test_error_is_no_progress_and_closes_the_call(clock: Clock, calls: OpenCalls) -> None:
    def fail() -> None:
        with calls.call("learner", "trains version 1"):
            clock.now += 5
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert calls.quiet_s == 5
    assert calls.lines() == []
    clock.now += 100
    assert calls.stuck(1) == []


def test_actors_that_work_on_one_call_for_long_are_stuck(clock: Clock, calls: OpenCalls) -> None:
    with calls.call("scorer", "scores group 1"), calls.call("buffer", "waits", is_waiting=True):
        clock.now += 6
        with calls.call("generator-0", "samples group 2"), calls.call("scorer", "scores group 2"):
            clock.now += 4
            assert calls.stuck(11) == []
            assert calls.stuck(10) == ["scorer"]  # not the buffer, which waits for other actors
            assert calls.stuck(4.5) == ["scorer"]
            assert calls.stuck(4) == ["generator-0", "scorer"]
        assert calls.stuck(10) == ["scorer"]
    assert calls.stuck(0) == []


def test_lines_show_the_oldest_call_of_each_actor(clock: Clock, calls: OpenCalls) -> None:
    assert calls.lines() == []
    with calls.call("scorer", "scores group 1"):
        clock.now += 6
        with (
            calls.call("generator-0", "samples group 2"),
            calls.call("scorer", "scores group 3"),
            calls.call("scorer", "scores group 4"),
            calls.call("buffer", "waits for the groups of step 1", is_waiting=True),
        ):
            clock.now += 4
            assert calls.lines() == [
                "buffer: waits for the groups of step 1 for 4 s",
                "generator-0: samples group 2 for 4 s",
                "scorer: scores group 1 for 10 s (and 2 more calls)",
            ]
