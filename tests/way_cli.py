"""Count what one group and one weight sync pass through: `python tests/way_cli.py [checkout] [--names]`.

A run of two steps in one process (torch engine, `tests/local_runs.py` of the checkout) is traced from its
checks to its end. A function counts once it is entered, a class once one of its methods is, and a file once one
of its functions is; the body of a class, which runs as its module is imported, does not count.
"""

import inspect
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MADE = ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")


def traced(package: Path) -> set[CodeType]:
    """Run two steps, and return the code of the package that was entered."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_NEWLOCALS:  # not the body of a class
            entered.add(frame.f_code)

    from local_runs import make_config, train  # type: ignore[import-not-found,unused-ignore]

    config = make_config("algorithm.num_steps=2")
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(config, Path(folder) / "run")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {code for code in entered if Path(code.co_filename).is_relative_to(package)}


def counted(package: Path, shows_names: bool) -> str:
    """Return the numbers of files, classes and functions."""
    names = {(code.co_filename, code.co_qualname) for code in traced(package) if code.co_name not in MADE}
    names = {(file, name) for file, name in names if not name.rpartition(".")[2].startswith("<")}
    classes = set()
    for file, name in names:
        owner = name.rpartition(".")[0]
        if owner and not owner.endswith("<locals>"):
            classes.add((file, owner))
    files = {file for file, _ in names}
    if shows_names:
        for file, name in sorted(names):
            print(Path(file).relative_to(package), name)
    return f"{len(files)} files, {len(classes)} classes, {len(names)} functions"


def main(arguments: list[str]) -> None:
    checkout = Path(next((each for each in arguments if not each.startswith("-")), Path(__file__).parents[1]))
    if os.environ.get("WAY_CHECKOUT") == str(checkout):
        print(counted(checkout / "grpo_ray", "--names" in arguments))
        return
    paths = os.pathsep.join(str(path) for path in (checkout, checkout / "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "WAY_CHECKOUT": str(checkout)}
    subprocess.run([sys.executable, "-P", __file__, *arguments], env=environment, cwd=checkout, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
