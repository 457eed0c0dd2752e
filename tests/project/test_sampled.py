"""The table of the cases that `make test` runs: it names tests and cases that exist."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sampled

FOLDER = Path("/repository")
FILES = {name.partition("::")[0] for name in sampled.KEPT}
WHOLE = ("test_one.py::test_a[x]", "test_one.py::test_a[y/[0]]", "test_one.py::test_b", "test_two.py::test_c")


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "KEPT", {"test_one.py::test_a": ("y/[0]",), "test_three.py::test_a": ("x",)})


def left(collected: Sequence[str], *args: str, last_failed: bool = False, session: Any = None) -> list[str]:
    """Return the tests that are left to the campaign when `pytest *args` has collected these."""
    marked: list[str] = []
    items: list[Any] = [
        SimpleNamespace(
            nodeid=f"tests/{name}",
            path=FOLDER / "tests" / name.partition("::")[0],
            add_marker=lambda _, name=name: marked.append(name),
            session=session or SimpleNamespace(),
        )
        for name in collected
    ]
    config: Any = SimpleNamespace(
        args=list(args),
        invocation_params=SimpleNamespace(dir=FOLDER / "docs"),
        getoption=lambda name, default: last_failed,
    )
    sampled.leave_the_others_to_the_campaign(config, items)
    return marked


def test_cases_that_are_not_kept_are_left_to_the_campaign() -> None:
    assert left(WHOLE, "../tests") == ["test_one.py::test_a[x]"]


def test_a_kept_test_that_a_whole_file_lacks_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"keeps cases of test_one\.py::test_a, and there is no such"):
        left(WHOLE[2:], "../tests/test_one.py", "../tests/test_two.py::test_c")


def test_a_kept_case_that_a_whole_file_lacks_is_an_error() -> None:
    text = r"keeps test_one\.py::test_a\[y/\[0\]\], and the test has no such case; it has: x, z$"
    session: Any = SimpleNamespace(shouldfail=False)
    with pytest.raises(pytest.UsageError, match=text) as caught:
        left(["test_one.py::test_a[z]", *WHOLE[:1]], "../tests", session=session)
    assert session.shouldfail == str(caught.value)  # it is all that is seen of a worker's error


def test_a_part_of_a_file_need_not_have_its_kept_cases() -> None:
    assert left(WHOLE[2:3], "../tests/test_one.py::test_b") == []
    assert left(WHOLE[:1], "../tests/test_one.py::test_a[x]", "../tests/test_two.py") == [WHOLE[0]]
    assert left(WHOLE[2:], last_failed=True) == []


def test_every_file_of_the_table_exists() -> None:
    """A file that was renamed is never collected, so no collection would find it missing."""
    present = {path.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    assert FILES - present == set()
