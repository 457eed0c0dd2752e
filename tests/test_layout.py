"""The layout of grpo_ray/: seventeen entries, each of which imports only what stands above it."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_ray"
ORDER = [
    "types",
    "errors",
    "config",
    "algorithms",
    "telemetry",
    "rewards",
    "tasks",
    "models",
    "policy",
    "transfer",
    "engines",
    "episodes",
    "actors",
]
ORDER += ["cluster", "run", "tools", "api"]


def imported(path: Path) -> set[str]:
    """Return the entries of grpo_ray/ that a module imports, also inside of functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [f"{node.module}." for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    names += [f"{alias.name}." for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[1] for name in names if re.match(r"grpo_ray\.\w", name)}


def test_the_package_has_seventeen_entries() -> None:
    code = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py"]
    entries = {path.stem for path in code if not path.name.startswith("__")}
    assert entries == set(ORDER)


@pytest.mark.slow
def test_each_entry_imports_only_what_stands_above_it() -> None:
    upward = []
    for path in PACKAGE.rglob("*.py"):
        entry = path.relative_to(PACKAGE).with_suffix("").parts[0]
        below = set(ORDER[ORDER.index(entry) + 1 :]) if entry in ORDER else set()
        upward += [f"{path.relative_to(PACKAGE)} imports {name}" for name in imported(path) & below]
    assert upward == []


def test_ray_and_vllm_are_imported_where_the_layout_says() -> None:
    for module, rooms in (
        ("ray", ("cluster", "telemetry", "tools")),
        ("vllm", ("transfer", "engines", "episodes", "tools")),
    ):
        statement = re.compile(rf"^\s*(?:import|from) {module}\b", re.M)
        found = {
            path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if statement.search(path.read_text())
        }
        assert found
        assert {path.parts[0] for path in found} <= set(rooms), found


def test_private_names_of_ray_stand_in_one_file() -> None:
    found = [path for path in PACKAGE.rglob("*.py") if "ray._private" in path.read_text()]
    assert len(found) <= 1, found
