"""The prose check of `make lint` (.ci/check_prose.py)."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

check_prose = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / ".ci/check_prose.py")))

REFUSED = (
    "The group whose tokens are old.", "Replaces whoever died.", "Nobody waits for it.",
    "Keeps so many checkpoints.", "Skipped for users. Who is left trains.",
)  # fmt: skip
IDIOMS = (
    "Tested is one file.", "Short. Of a request only one field counts.", "The file vouches for it.",
    "Experts are no linear layers.", "It weighs the more, the less it is solved.", "It goes beside the step.",
)  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
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


@pytest.mark.parametrize("line", [*IDIOMS, "There is no file, and it is no longer read, `beside` what is."])
def test_idioms_of_what_users_read(line: str) -> None:
    for name, text in (
        ("page.md", f"\n| {line} | b |\n"),
        ("module.py", f"raise ValueError(\n'{line}')\n"),
        ("module.py", f'class A(Section):\n    """{line}"""\n'),
    ):
        found = check_prose.findings_for_readers(Path(name), text)
        assert [line for line, _ in found] == [2] * (line in IDIOMS), name
    assert not check_prose.findings_for_readers(Path("module.py"), f'def f():\n    """{line}"""\n')


def test_sentences_links_and_courses_of_pages() -> None:
    def found(text: str) -> list[int]:
        return [line for line, _ in check_prose.findings_for_readers(Path("page.md"), text)]

    assert found("One.\nTwo " + "and [two](a.md) " * 15 + ".\n") == [2]
    assert not found("- " + "one " * 30 + "\n- " + "two `a b` " * 15 + "\n\n    " + "code " * 40 + "\n")
    assert found("| what no key offers | [read](a.md) |\n\nIn the course.\n") == [1, 3]
    assert not found("CS336 has notes. In the course.\n")


def test_persons_and_data_are_left_alone() -> None:
    assert not check_prose.findings(
        Path("page.md"), "For users who train, and anyone whose GPU is small; `who` is code.\n"
    )
    assert not check_prose.findings(Path("module.py"), 'question = "Who is nobody, and so many?"\n')


def test_a_phrase_is_found_over_lines_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("One.\nIt keeps so\nmany.\n")
    assert check_prose.main(tmp_path) == 1
    assert "docs/page.md:2: `so" in capsys.readouterr().out
    (tmp_path / "docs" / "page.md").write_text("One.\nIt keeps N.\n")
    assert check_prose.main(tmp_path) == 0
