"""Who is asked what and since when, by a clock that the test sets."""

import pytest

from grpo_ray.run.open_calls import Watch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Watch:
    return Watch(clock)


def test_every_answer_is_progress(clock: Clock, watch: Watch) -> None:
    clock.now += 7
    assert watch.quiet_s == 7
    with watch.call("learner", "trains version 1"):
        clock.now += 5
        assert watch.quiet_s == 12  # being asked is none
    assert watch.quiet_s == 0
    clock.now += 3
    watch.progress()
    assert watch.quiet_s == 0


def test_error_is_no_progress_and_closes_the_call(clock: Clock, watch: Watch) -> None:
    def fail() -> None:
        with watch.call("learner", "trains version 1"):
            clock.now += 5
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert watch.quiet_s == 5
    assert watch.lines() == []
    clock.now += 100
    assert watch.stuck(1) == []


def test_stuck_are_those_who_work_on_one_call_for_long(clock: Clock, watch: Watch) -> None:
    with watch.call("scorer", "scores group 1"), watch.call("buffer", "waits", is_waiting=True):
        clock.now += 6
        with watch.call("generator-0", "samples group 2"), watch.call("scorer", "scores group 2"):
            clock.now += 4
            assert watch.stuck(11) == []
            assert watch.stuck(10) == ["scorer"]  # never the buffer, which waits for others
            assert watch.stuck(4.5) == ["scorer"]
            assert watch.stuck(4) == ["generator-0", "scorer"]
        assert watch.stuck(10) == ["scorer"]
    assert watch.stuck(0) == []


def test_line_an_actor_with_what_it_has_done_longest(clock: Clock, watch: Watch) -> None:
    assert watch.lines() == []
    with watch.call("scorer", "scores group 1"):
        clock.now += 6
        with (
            watch.call("generator-0", "samples group 2"),
            watch.call("scorer", "scores group 3"),
            watch.call("scorer", "scores group 4"),
            watch.call("buffer", "waits for the groups of step 1", is_waiting=True),
        ):
            clock.now += 4
            assert watch.lines() == [
                "buffer: waits for the groups of step 1 for 4 s",
                "generator-0: samples group 2 for 4 s",
                "scorer: scores group 1 for 10 s (and 2 more calls)",
            ]
