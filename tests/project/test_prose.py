"""The prose check of `make lint` (.ci/check_prose.py)."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("check_prose", ROOT / ".ci" / "check_prose.py")
assert spec is not None
assert spec.loader is not None
check_prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_prose)


@pytest.mark.parametrize(
    "line",
    [
        "The group whose tokens are old.",
        "Replaces whoever died.",
        "Nobody waits for it.",
        "Keeps so many checkpoints.",
        "Skipped for users. Who is left trains.",
    ],
)
def test_prose_that_is_refused(line: str) -> None:
    for name, text in (
        ("page.md", f"Good.\n{line}\n"),
        ("module.py", f"x = 1\n# {line}\n"),
        ("module.py", f'class A:\n    """{line}"""\n'),
        ("module.py", f'x: int\n"""{line}"""\n'),
    ):
        assert {found for found, _ in check_prose.findings(Path(name), text)} == {2}, name


@pytest.mark.parametrize("opening", ["What", "Whether", "How", "Of", "Who", "Nobody", "As", "That"])
def test_a_docstring_does_not_open_with(opening: str) -> None:
    text = f'def f():\n    """{opening} it is."""\n'
    complaints = [complaint for _, complaint in check_prose.findings(Path("module.py"), text)]
    assert any("opens with" in complaint for complaint in complaints)
    assert not check_prose.findings(Path("module.py"), '"""Assert that it is."""\n')


def test_persons_and_data_are_left_alone() -> None:
    assert not check_prose.findings(
        Path("page.md"), "For users who train, and anyone whose GPU is small; `who` is code.\n"
    )
    assert not check_prose.findings(Path("module.py"), 'question = "Who is nobody, and so many?"\n')


def test_a_phrase_is_found_across_lines_and_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("One.\nIt keeps so\nmany.\n")
    assert check_prose.main(tmp_path) == 1
    assert "docs/page.md:2: `so" in capsys.readouterr().out
    (tmp_path / "docs" / "page.md").write_text("One.\nIt keeps N.\n")
    assert check_prose.main(tmp_path) == 0
