"""Open calls and their ages, by a clock that the test sets."""

import itertools

import pytest

from grpo_ray.watch.open_calls import OpenCalls
from grpo_ray.watch.restarts import BudgetUsedUp, RestartBudget


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


def pauses(at: list[float], backoff_s: float = 2.0, max_restarts: int = 100) -> list[float]:
    """Return the pause before each restart, for deaths at these seconds."""
    times = iter(at)
    budget = RestartBudget("recovery.max_restarts", max_restarts, backoff_s, clock=lambda: next(times))
    return [budget.spend("scorer", "it died") for _ in at]


def test_pause_doubles_up_to_a_minute() -> None:
    assert pauses([10.0 * n for n in range(8)]) == [2, 4, 8, 16, 32, 60, 60, 60]
    assert pauses([0, 1, 2], backoff_s=0.0) == [0, 0, 0]


@pytest.mark.parametrize(("gap_s", "then"), [(599.9, 4.0), (600.0, 2.0)])
def test_death_ten_minutes_after_the_previous_one_starts_a_new_series(gap_s: float, then: float) -> None:
    assert pauses([0.0, gap_s]) == [2.0, then]  # time.monotonic() starts at 0 when the machine boots


def test_series_counts_from_the_last_death_not_from_the_first() -> None:
    assert pauses([0, 500, 1000, 1500, 2100, 2200]) == [2, 4, 8, 16, 2, 4]


def test_used_up_budget_shows_the_first_error_and_not_its_consequences() -> None:
    clock = itertools.count(step=1000)  # every restart counts, even in a new series
    budget = RestartBudget("recovery.max_restarts", 2, 1.0, clock=lambda: float(next(clock)))
    budget.spend("generator-0", "generator-0 died: out of memory")
    budget.spend("scorer", "scorer died: killed")
    with pytest.raises(BudgetUsedUp) as caught:
        budget.spend("generator-1", "generator-1 died: killed")
    assert str(caught.value) == (
        "recovery.max_restarts: 2 restarts within an hour are used up. "
        "The first error was: generator-0 died: out of memory"
    )


def test_budget_of_zero_shows_the_only_error() -> None:
    budget = RestartBudget("recovery.max_restores", 0, 1.0)
    with pytest.raises(BudgetUsedUp, match=r"0 restores within an hour .* The first error was: scorer died"):
        budget.spend("scorer", "scorer died")


def test_budget_refills_after_an_hour() -> None:
    """One death per day never ends a run, and neither do `max_per_hour` deaths per hour."""
    pauses([86_400.0 * day for day in range(400)], max_restarts=1)
    pauses([1800.0 * n for n in range(1000)], max_restarts=2)
    with pytest.raises(BudgetUsedUp):
        pauses([1799.0 * n for n in range(1000)], max_restarts=2)


def test_different_actors_that_die_at_about_the_same_time_count_once() -> None:
    """One hiccup of the network makes all 64 Generators miss the same sync."""
    now = [0.0]
    budget = RestartBudget("recovery.max_restarts", 2, 1.0, clock=lambda: now[0])
    for now[0] in (0.0, 1000.0):
        assert {budget.spend(f"generator-{i}", "missed the sync") for i in range(64)} == {1.0}
    now[0] = 1000.0 + 29.9
    assert budget.spend("scorer", "also of that cause") == 1.0
    now[0] = 1000.0 + 30.1
    with pytest.raises(BudgetUsedUp):
        budget.spend("generator-99", "another cause")


def test_an_actor_that_dies_again_counts_again_however_soon() -> None:
    budget = RestartBudget("recovery.max_restarts", 3, 1.0, clock=lambda: 0.0)
    assert [budget.spend("generator-0", "it crashes at its start") for _ in range(3)] == [1.0, 2.0, 4.0]
    with pytest.raises(BudgetUsedUp):
        budget.spend("generator-0", "it crashes at its start")
