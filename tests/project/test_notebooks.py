"""The notebooks run from top to bottom where an event loop is running, and say what the pages say."""

import ast
import asyncio
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from run_process import output_of

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ROOT / "examples" / "notebooks"


def cells(name: str, kind: str = "code") -> list[str]:
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


def run_cells(sources: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """Run cells as Jupyter does, in one namespace and a running loop; return it, and each last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []

    async def evaluate(code: Any) -> Any:
        result = eval(code, names)
        return await result if inspect.isawaitable(result) else result

    async def main() -> None:
        for source in sources:
            tree = ast.parse(source)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            await evaluate(compile(tree, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
            if last is not None:
                code = compile(ast.Expression(last.value), "cell", "eval", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                shown.append(await evaluate(code))

    asyncio.run(main())
    return names, shown


def test_one_step_is_the_program_of_its_page_and_fits_on_one() -> None:
    program = (ROOT / "docs" / "one_step.py").read_text()
    assert len(program.splitlines()) <= 100
    for source in cells("grpo_in_one_step"):
        text = source.replace('QUICKSTART = "../../configs/quickstart.yaml"', "").strip()
        lines = [line for line in text.splitlines() if line.strip()]
        flat = textwrap.dedent(program[program.index("async def main") :].partition("\n")[2])
        known = {line.strip() for line in (*program.splitlines(), *flat.splitlines())}
        assert [line for line in lines if line.strip() not in known] == []
    script = (ROOT / "examples" / "own_reward" / "train.py").read_text()
    assert sum(source in script for source in cells("your_reward_your_data")) >= 3


@pytest.mark.slow
def test_grpo_in_one_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(NOTEBOOKS)
    run_cells(cells("grpo_in_one_step"))
    shown = capsys.readouterr().out
    before, after = map(float, re.findall(r"mean reward ([\d.]+)", shown))
    assert after > before + 0.1, shown
    (agreement,) = re.findall(r"agree to (\S+) nats", shown)
    assert float(agreement) < 1e-4


@pytest.mark.slow
def test_your_reward_your_data(here: Path) -> None:
    sources = cells("your_reward_your_data")
    index = next(i for i, source in enumerate(sources) if source.startswith("CONFIG"))
    short = 'CONFIG["algorithm"]["num_steps"] = 2\nCONFIG["model"]["tiny"]["warmup"]["num_steps"] = 2'
    names, shown = run_cells([*sources[: index + 1], short, *sources[index + 1 :]])
    assert shown[0] == (1.0, 0.0, 0.0)
    assert [row["step"] for row in shown[1]] == [0, 2]
    assert names["run"].is_finished
    assert shown[-1].endswith(" parameters")


def test_examples_are_short_and_say_how_to_run_them() -> None:
    folders = [path.parent for path in (ROOT / "examples").glob("*/README.md")]
    assert len(folders) >= 3
    for folder in folders:
        code = [line for path in folder.glob("*.py") for line in path.read_text().splitlines()]
        assert 0 < len(code) <= 60, folder
        assert re.search(r"^    (grpo-ray train|python examples/)", (folder / "README.md").read_text(), re.M)
    loop = LOOP.read_text().split('"""', 2)[2].splitlines()
    assert len([line for line in loop if line.strip()]) <= 40


LOOP = ROOT / "docs" / "own_loop.py"
RUN_LOOP = f"""
import runpy, sys
runpy.run_path({str(LOOP)!r}, run_name="__main__")
sys.exit(bool({{"ray", "vllm"}} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_without_ray_and_vllm(tmp_path: Path) -> None:
    environment = {"GRPO_RAY_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    shown = output_of(sys.executable, "-c", RUN_LOOP, env=environment)
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", shown)]
    assert rewards[0] < 0.6, shown
    assert rewards[-1] > 0.9, shown
