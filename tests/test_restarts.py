"""The restart budget by a clock that the test sets."""

import itertools

import pytest

from grpo_ray.errors import RunError
from grpo_ray.run.restarts import RestartBudget


def pauses(at: list[float], backoff_s: float = 2.0, max_restarts: int = 100) -> list[float]:
    """Return the pause before each restart, for deaths at these seconds."""
    times = iter(at)
    budget = RestartBudget(max_restarts, backoff_s, clock=lambda: next(times))
    return [budget.spend("it died") for _ in at]


def test_pause_doubles_up_to_a_minute() -> None:
    assert pauses([10.0 * n for n in range(8)]) == [2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize(("gap_s", "then"), [(599.9, 4.0), (600.0, 2.0), (601.0, 2.0)])
def test_death_ten_minutes_after_the_previous_one_starts_a_new_series(gap_s: float, then: float) -> None:
    assert pauses([5.0, 5.0 + gap_s]) == [2.0, then]


def test_series_counts_from_the_last_death_not_from_the_first() -> None:
    assert pauses([0, 500, 1000, 1500, 2100, 2200]) == [2, 4, 8, 16, 2, 4]


@pytest.mark.parametrize("start", [0.0, 3.0, 1e6])
def test_first_death_is_never_part_of_a_series(start: float) -> None:
    """time.monotonic() starts at 0 when the machine boots."""
    assert pauses([start]) == [2.0]


def test_no_backoff_is_no_pause() -> None:
    assert pauses([0, 1, 2], backoff_s=0.0) == [0, 0, 0]


def test_long_backoff_is_a_minute_at_most() -> None:
    assert pauses([0, 1], backoff_s=100.0) == [60, 60]


def test_used_up_budget_shows_the_first_error_and_not_its_consequences() -> None:
    clock = itertools.count(step=10_000)  # every restart counts, even in a new series
    budget = RestartBudget(2, 1.0, clock=lambda: float(next(clock)))
    for error in ("generator-0 died: out of memory", "scorer died: killed"):
        budget.spend(error)
    for _ in range(2):
        with pytest.raises(RunError) as caught:
            budget.spend("generator-1 died: killed")
        assert str(caught.value) == (
            "recovery.max_restarts: 2 restarts are used up. "
            "The first error was: generator-0 died: out of memory"
        )
    assert budget.num_restarts == 2


def test_budget_of_zero_shows_the_only_error() -> None:
    budget = RestartBudget(0, 1.0)
    with pytest.raises(RunError, match=r"0 restarts are used up. The first error was: scorer died"):
        budget.spend("scorer died")
    assert budget.num_restarts == 0
