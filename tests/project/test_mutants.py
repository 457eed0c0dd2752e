"""profiling/mutants: which changes are made, and which test files are to notice them; none is tried."""

from collections.abc import Callable
from types import ModuleType

import pytest

SOURCE = '''"""Not min(1, 2)."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import that
__all__ = ["x"] * 1
LIMIT: "Literal[3]" = 10_000  # é: offsets are bytes


@dataclass(frozen=True)
class Row:
    size: int = 4

    def fits(self, é, other=-0.5):
        assert é < 1
        if not (é in other  # not in
                and é is not None):
            raise ValueError("é" + str(1 + 1))
        text = f"{é + 1}"
        return [min(a, True) ** .5 for a, b in zip(é, other, strict=True)], other.max(-1)

    def __repr__(self):
        return "Row" + str(1)
'''
CHANGES = [
    (6, "10_000", "10001", False),
    (11, "4", "5", False),
    (13, "-", "+", False),
    (15, "not ", "", True),
    (15, "in", "not in", True),
    (16, "and", "or", True),
    (16, "is not", "is", True),
    (19, "**", "*", True),
    (19, "True", "False", True),
    (19, "min", "max", True),
    (19, "-", "+", True),
    (19, "1", "2", True),
    (19, "max", "min", True),
]


@pytest.fixture
def scripts(profiling_script: Callable[[str], ModuleType]) -> tuple[ModuleType, ModuleType]:
    return profiling_script("mutants"), profiling_script("mutant_sites")


def test_what_is_changed_and_nothing_else(scripts: tuple[ModuleType, ModuleType]) -> None:
    source = SOURCE.encode()
    mutants = list(scripts[1].mutants_of("row.py", source))
    found = [(mutant.line, mutant.before, mutant.after, mutant.in_function) for mutant in mutants]
    assert sorted(found) == sorted(CHANGES)
    for mutant in mutants:
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
        compile(changed, "row.py", "exec")
        assert changed.count(b"\n") == source.count(b"\n")
        assert len(changed) - len(source) == len(mutant.after) - len(mutant.before)
        assert source[mutant.start : mutant.end].decode() == mutant.before
