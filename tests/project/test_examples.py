"""The folders of examples/; tests of the pages that show them run their code."""

import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_examples_are_short_and_say_how_to_run_them() -> None:
    folders = [path.parent for path in EXAMPLES.glob("*/README.md")]
    assert len(folders) >= 3
    for folder in folders:
        code = [line for path in folder.glob("*.py") for line in path.read_text().splitlines()]
        assert 0 < len(code) <= 60, folder
        assert re.search(r"^    (grpo-ray train|python examples/)", (folder / "README.md").read_text(), re.M)
