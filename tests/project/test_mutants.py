"""profiling/mutants: which changes are made, and which test files are to notice them; none is tried."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_the_files_for_a_mutant(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: Any
) -> None:
    mutants, sites = scripts
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    names = [f"t{place}.py" for place in range(20)]
    for name in names:
        (tmp_path / name).write_text("from grpo_ray.run import other, row\n" if name == "t19.py" else "")
    executed = {name: [1, 2, 7] if name == "t18.py" else [1, 2] for name in names[:19]}
    covering = {
        "seconds": {name: float(place) for place, name in enumerate(names)},
        "failed": ["t0.py"],
        "lines": {"grpo_ray/run/row.py": executed},
    }

    def files(line: int, in_function: bool = True) -> tuple[list[str], bool]:
        mutant = sites.Mutant("grpo_ray/run/row.py", line, 0, 1, "<", "<=", line, in_function)
        found, is_covered = mutants.files_for(mutant, covering)
        return found, is_covered

    assert files(7) == (["t18.py"], True)
    chosen, is_covered = files(2)
    assert (len(chosen), chosen[0], chosen[-1], is_covered) == (12, "t1.py", "t18.py", True)  # t0.py fails
    assert files(2)[0] == sorted(chosen, key=names.index)
    chosen, is_covered = files(9)  # not executed: what executes the module, or names it
    assert (len(chosen), chosen[-2:], is_covered) == (12, ["t18.py", "t19.py"], False)
    assert files(9, in_function=False) == (chosen, True)
    covering["seconds"] = dict.fromkeys(names, 100.0)
    assert len(files(2)[0]) == 2
    covering["seconds"] = dict.fromkeys(names, 1000.0)
    assert len(files(2)[0]) == 1
