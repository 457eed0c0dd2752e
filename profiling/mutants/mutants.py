"""Break one operator at a time in the heart, episodes and transfer, and see which test notices.

    python profiling/mutants/mutants.py map --out map.json -m "not ray and not vllm and not campaign"
    python profiling/mutants/mutants.py run map.json --seed 0 --count 60 --out result.json
    python profiling/mutants/mutants.py run map.json --sites grpo_ray/types.py:66 --out result.json
    python profiling/mutants/mutants.py run campaign.json --only-survivors result.json --out rest.json

`map` runs the tests under coverage and writes which test files execute each line, and their seconds. `run`
tries each mutant in a copy of the repository with temporary files and a model cache of its own. It runs up to
12 of the files that execute the line: the 6 fastest, and the 6 that know the module best (they name it, or
execute most of its lines), for at most 240 s by the map. A failure or a hang of 10 minutes is a catch.

Two kinds of line get the files that execute any line of the module, or name it. A line outside of functions is
executed once, at an import, so it belongs to no file. A line that no file executes may be executed in processes
that tests start, which are not measured; a survivor there is reported as uncovered.

Comparisons, `and` and `or`, arithmetic and signs are swapped, `not` is removed, an integer grows by 1, True and
False change places, and so do `min` and `max`. Left alone is what no test of behaviour can see: annotations,
decorators, `__all__`, imports for types, `assert`, zip's `strict`, and texts (f-strings, `raise`, `__repr__`).
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", "results", "__pycache__", ".*_cache", ".hypothesis")  # of the copies
ENTRIES = ["types.py", "objectives", "learning", "engines", "core", "cluster", "run", "episodes", "transfer"]
MAX_FILES, MAX_S, TIMEOUT_S = 12, 240, 600
Json = dict[str, Any]
OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*"),
}  # fmt: skip
NAMES = {"min": "max", "minimum": "maximum", "amin": "amax"}
NAMES |= {new: old for old, new in NAMES.items()}
SKIPPED = (ast.Assert, ast.Raise, ast.JoinedStr)
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list")


@dataclass(frozen=True)
class Mutant:
    """One change of a file: the bytes from `start` to `end`, which are `before`, become `after`."""

    file: str
    line: int
    start: int
    end: int
    before: str
    after: str
    statement: int  # its first line
    in_function: bool


def mutants_of(file: str, source: bytes) -> Iterator[Mutant]:
    """Yield the mutants of a file: at most one for each operator, constant or name."""
    offsets = [0]
    for text in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(text))

    def begin(node: Any) -> int:
        return int(offsets[node.lineno - 1] + node.col_offset)

    def end(node: Any) -> int:
        return int(offsets[node.end_lineno - 1] + node.end_col_offset)

    def change(first: int, last: int, old: str, new: str) -> tuple[int, int, str]:
        """Find `old` between two places, but not in a comment, and return its place and `new`."""
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), source[first:last])
        found = re.search(re.escape(old).replace(r"\ ", r"\s*").encode(), between)
        assert found is not None, (file, first, old)
        return first + found.start(), first + found.end(), new

    def changes(node: ast.AST) -> Iterator[tuple[int, int, str]]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=others):
                for before, operator, after in zip([left, *others], ops, others, strict=False):
                    yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.BoolOp(op=operator, values=values):
                for before, after in pairwise(values):
                    yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.BinOp(left=before, op=operator, right=after) if type(operator) in OPERATORS:
                yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.AugAssign(target=before, op=operator, value=after) if type(operator) in OPERATORS:
                yield change(end(before), begin(after), *OPERATORS[type(operator)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield change(begin(node), begin(operand), "not ", "")
            case ast.UnaryOp(op=ast.USub()):
                yield begin(node), begin(node) + 1, "+"
            case ast.Constant(value=bool(value)):
                yield begin(node), end(node), str(not value)
            case ast.Constant(value=int(value)):
                yield begin(node), end(node), str(value + 1)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in NAMES:
                yield end(node.func) - len(name), end(node.func), NAMES[name]

    for node, statement, in_function in _nodes(ast.parse(source), 1, False):
        for first, last, new in changes(node):
            line = source.count(b"\n", 0, first) + 1
            yield Mutant(file, line, first, last, source[first:last].decode(), new, statement, in_function)


def _nodes(node: ast.AST, statement: int, in_function: bool) -> Iterator[tuple[ast.AST, int, bool]]:
    """Yield the nodes that may be mutated, each with its statement's first line."""
    match node:
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.keyword(arg="strict"):  # of zip: an assertion
            return
        case ast.stmt():
            statement = node.lineno
    yield node, statement, in_function
    for field, value in ast.iter_fields(node):
        inner = in_function or (
            field == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        )
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED) and field not in SKIPPED_FIELDS:
                yield from _nodes(child, statement, inner)


@contextmanager
def copied(tree: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Copy a tree; yield the copy and the environment of its tests. What they write goes at the end."""
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as name:
        copy, temporary = Path(name) / "tree", Path(name) / "tmp"
        temporary.mkdir()
        shutil.copytree(tree, copy, ignore=_left_out if tree == ROOT else None, symlinks=True)
        profiling = copy / "profiling"
        paths = [str(copy), str(profiling), str(profiling / "mutants"), os.environ.get("PYTHONPATH")]
        environment = {"TMPDIR": str(temporary), "GRPO_RAY_CACHE": str(Path(name) / "models")}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": ""}
        yield copy, {**os.environ, **environment}


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names that are not copied; `runs` are those of the repository's root, not of its tests."""
    found = shutil.ignore_patterns(*LEFT_OUT)(folder, names)
    return found | ({"runs"} if Path(folder) == ROOT else set())


def run_tests(
    tree: Path, environment: dict[str, str], *arguments: str, timeout_s: float | None
) -> tuple[int, str]:
    """Return pytest's exit status and output; end it after `timeout_s`, with status -1."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what its tests have left behind
            process.wait()
        output.seek(0)
        return status, output.read()


def make_map(options: argparse.Namespace) -> None:
    """Run the tests under coverage and write the map."""
    from coverage import Coverage

    with copied(ROOT) as (tree, environment), tempfile.TemporaryDirectory() as folder:
        plugin = ["-p", "mutant_recorder", "-n", str(options.n), "--dist", "loadfile", "--no-loadscope-reorder"]
        recorded = {**environment, "MUTANT_RECORDS": folder}
        _, output = run_tests(tree, recorded, *plugin, "-m", options.marks, *options.tests, timeout_s=None)
        print(output[-2000:])
        tests = json.loads((Path(folder) / "tests.json").read_text())
        coverage = Coverage(Path(folder) / ".coverage", config_file=False)
        coverage.combine([folder])
        data = coverage.get_data()
        lines: dict[str, dict[str, list[int]]] = {}
        for path in data.measured_files():
            file = str(Path(path).relative_to(tree))
            lines[file] = defaultdict(list)
            for line, contexts in sorted(data.contexts_by_lineno(path).items()):
                for context in filter(None, contexts):
                    lines[file][context].append(line)
        digests = {file: _digest(tree / file) for file in lines}
        failed = []  # those that also fail without coverage: they would catch everything
        for file in tests["failed"]:
            if run_tests(tree, environment, "-m", options.marks, file, timeout_s=TIMEOUT_S)[0] != 0:
                failed.append(file)
    written = {"marks": options.marks, "digests": digests, "seconds": tests["seconds"], "failed": failed}
    options.out.write_text(json.dumps({**written, "lines": lines}))
    print(f"{len(tests['seconds'])} test files; these fail, and will not be used: {failed}")


def files_for(mutant: Mutant, covering: Json) -> tuple[list[str], bool]:
    """Return the test files to run, the fastest first, and whether a file executes the line."""
    seconds = {file: s for file, s in covering["seconds"].items() if file not in covering["failed"]}
    executed = {
        file: lines for file, lines in covering["lines"].get(mutant.file, {}).items() if file in seconds
    }
    module = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    naming = re.compile(rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    names = {file for file in seconds if naming.search((ROOT / file).read_text())}
    found = [file for file in executed if mutant.line in executed[file]]
    found = found or [file for file in executed if mutant.statement in executed[file]]
    is_covered = bool(found) or not mutant.in_function
    if not found or not mutant.in_function:
        found = sorted({*executed, *names})
    fastest = sorted(found, key=lambda file: seconds[file])
    best = sorted(found, key=lambda file: (file in names, len(executed.get(file, []))), reverse=True)
    chosen: list[str] = []
    for file in dict.fromkeys(file for pair in zip(fastest, best, strict=True) for file in pair):
        fits = len(chosen) < MAX_FILES and sum(seconds[other] for other in [*chosen, file]) <= MAX_S
        if fits or not chosen:
            chosen.append(file)
    return sorted(chosen, key=lambda file: seconds[file]), is_covered


def try_mutant(mutant: Mutant, covering: Json, marks: str, template: Path) -> Json:
    """Return the mutant's fields and its outcome."""
    files, is_covered = files_for(mutant, covering)
    started, status, output = time.monotonic(), 0, ""
    if files:
        with copied(template) as (tree, environment):
            path = tree / mutant.file
            source = path.read_bytes()
            changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
            compile(changed, mutant.file, "exec")
            path.write_bytes(changed)
            shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)
            status, output = run_tests(tree, environment, "-x", "-m", marks, *files, timeout_s=TIMEOUT_S)
    test = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    caught_by = "a timeout" if status == -1 else test[1] if test else f"exit status {status}"
    is_caught, is_covered = status not in (0, 5), is_covered and status != 5  # 5: no test has the marks
    result = {"caught_by": caught_by if is_caught else None, "is_covered": is_covered, "files": files}
    text = (ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()
    return {**asdict(mutant), **result, "seconds": round(time.monotonic() - started, 1), "text": text}


def drawn(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants that the options ask for."""
    if options.only_survivors:
        names = [field.name for field in fields(Mutant)]
        earlier = json.loads(options.only_survivors.read_text())["mutants"]
        return [Mutant(**{name: one[name] for name in names}) for one in earlier if one["caught_by"] is None]
    draw = random.Random(options.seed)
    if options.sites:
        mutants = []
        for site in options.sites.split(","):
            file, line = site.rsplit(":", 1)
            here = [one for one in mutants_of(file, (ROOT / file).read_bytes()) if one.line == int(line)]
            if not here:
                raise ValueError(f"{site} has nothing to change")
            mutants.append(draw.choice(here))
        return mutants
    paths = [ROOT / "grpo_ray" / entry for entry in options.entries]
    modules = sorted(module for path in paths for module in (path.rglob("*.py") if path.is_dir() else [path]))
    mutants = [
        mutant for path in modules for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_bytes())
    ]
    print(f"{len(mutants):,} possible mutants of {len(modules)} files")
    return draw.sample(mutants, min(options.count, len(mutants)))


def run(options: argparse.Namespace) -> None:
    """Try mutants; print a line for each and write the result, also of a run that is interrupted."""
    covering = json.loads(options.map.read_text())
    mutants, marks, done = drawn(options), options.marks or covering["marks"], []
    for file in {mutant.file for mutant in mutants}:
        if covering["digests"].get(file) != _digest(ROOT / file):
            raise ValueError(f"{file} has changed since {options.map} was written, make the map again")
    with copied(ROOT) as (template, environment), ThreadPoolExecutor(options.jobs) as pool:
        quick = min(covering["seconds"].keys() - covering["failed"], key=covering["seconds"].__getitem__)
        status, output = run_tests(
            template, environment, "-m", marks, quick, timeout_s=TIMEOUT_S
        )  # and compile
        if status not in (0, 5):
            raise ValueError(f"{quick} fails without a mutant:\n{output[-2000:]}")
        tries = [pool.submit(try_mutant, mutant, covering, marks, template) for mutant in mutants]
        try:
            for future in as_completed(tries):
                done.append(one := future.result())
                caught = f"caught by {one['caught_by']}"
                survived = f"SURVIVED{'' if one['is_covered'] else ' (uncovered)'}: {one['text']}"
                change = f"{one['file']}:{one['line']}  {one['before']} -> {one['after']}"
                print(
                    f"{change}  {one['seconds']:.0f} s  {caught if one['caught_by'] else survived}", flush=True
                )
                options.out.write_text(
                    json.dumps({"seed": options.seed, "marks": marks, "mutants": done}, indent=1)
                )
        finally:
            pool.shutdown(cancel_futures=True)
    survivors = [one for one in done if one["caught_by"] is None]
    uncovered = sum(not one["is_covered"] for one in survivors)
    share = (len(done) - len(survivors)) / max(1, len(done))
    print(
        f"{len(done) - len(survivors)} of {len(done)} caught ({share:.0%}); {uncovered} survivors are uncovered"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    commands = parser.add_subparsers(required=True)
    mapping = commands.add_parser("map", help="run the tests, and write which files execute which lines")
    mapping.add_argument("tests", nargs="*", default=["tests"], help="files (default: all)")
    mapping.add_argument("-n", type=int, default=2, help="processes (default: 2)")
    mapping.add_argument("-m", dest="marks", default="not campaign", help="pytest's mark expression")
    mapping.set_defaults(command=make_map)
    running = commands.add_parser("run", help="try mutants")
    running.add_argument("map", type=Path)
    running.add_argument("-m", dest="marks", help="pytest's mark expression (default: the map's)")
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--count", type=int, default=60, help="mutants, drawn from all of --entries")
    running.add_argument("--entries", nargs="+", default=ENTRIES, help="of grpo_ray/ (default: %(default)s)")
    running.add_argument("--sites", metavar="FILE:LINE,...", help="instead: one mutant of each of these lines")
    running.add_argument("--only-survivors", type=Path, metavar="RESULT", help="instead: those of a result")
    running.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: 2)")
    running.set_defaults(command=run)
    for command in (mapping, running):
        command.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        options.command(options)
    except ValueError as error:
        print(f"mutants.py: {error}", file=sys.stderr)
        return 2
    return 0


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
