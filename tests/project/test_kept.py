"""The mark `kept`: `make test` runs the cases that it names, which exist, and the campaign the others."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import leave_the_others_to_the_campaign

KEPT = pytest.mark.kept("y/[0]").mark


def left(cases: Sequence[str], *args: str, last_failed: bool = False, session: Any = None) -> list[str]:
    """Return the cases that are left to the campaign when `pytest *args` has collected these, and a test."""
    marked: list[str] = []
    items: list[Any] = [
        SimpleNamespace(
            nodeid=f"tests/test_one.py::test_a[{case}]",
            get_closest_marker=lambda name: KEPT if name == "kept" else None,
            add_marker=lambda _, case=case: marked.append(case),
            session=session,
        )
        for case in cases
    ]
    items.append(SimpleNamespace(nodeid="tests/test_two.py::test_b", get_closest_marker=lambda name: None))
    config: Any = SimpleNamespace(args=list(args), getoption=lambda name, default: last_failed)
    leave_the_others_to_the_campaign(config, items)
    return marked


def test_cases_that_are_not_kept_are_left_to_the_campaign() -> None:
    assert left(["x", "y/[0]"], "../tests") == ["x"]


def test_a_kept_case_that_the_test_lacks_is_an_error() -> None:
    session: Any = SimpleNamespace(shouldfail=False)
    text = r"test_one\.py::test_a is to keep \['y/\[0\]'\], and its cases are \['x', 'z'\]$"
    with pytest.raises(pytest.UsageError, match=text) as caught:
        left(["z", "x"], "../tests", session=session)
    assert session.shouldfail == str(caught.value)  # it is all that is seen of a worker's error


def test_a_single_case_may_be_asked_for() -> None:
    assert left(["x"], "../tests/test_one.py::test_a[x]", "../tests/test_two.py") == ["x"]
    assert left(["x"], last_failed=True) == ["x"]
