"""Run benchmarks of grpo_ray's parts; see docs/lab/profiling.md.

    python profiling/bench.py --list
    python profiling/bench.py learner_step --rounds 5 --out before.json
    python profiling/bench.py compare before.json after.json

Within a benchmark the cases take turns, so that a drift in the machine's speed affects all of them equally;
read the ratios rather than the seconds.
"""

import argparse
import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks.machine import describe_machine, describe_versions
from benchmarks.results import Options, Result, print_comparison, print_result, read_result
from rich.console import Console

from grpo_ray.tools.arguments import positive
from grpo_ray.tools.cli import set_library_defaults

RESULTS = Path(__file__).parent / "results"
WIDTH = 200  # of the tables, on any terminal: no figure is cut off


def main(arguments: Sequence[str] | None = None) -> int:
    set_library_defaults()
    options = _parser().parse_intermixed_args(arguments)
    console = Console(highlight=False, soft_wrap=True, width=WIDTH)
    if options.list:
        known = modules()
        for name, module in known.items():
            console.print(f"{name:<{max(map(len, known))}}  {module.TITLE}")
        return 0
    try:
        if options.name == "compare":
            if len(options.rest) != 2:
                raise ValueError(f"compare takes two result files, not {len(options.rest)}")
            print_comparison(read_result(Path(options.rest[0])), read_result(Path(options.rest[1])), console)
        else:
            measure(options, console)
    except ValueError as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a benchmark, or `compare` followed by two result files"
    )
    parser.add_argument("rest", metavar="KEY=VALUE|FILE", nargs="*", help="changes to the configuration")
    parser.add_argument("--list", action="store_true", help="print the benchmarks and exit")
    parser.add_argument(
        "--rounds", type=positive, metavar="N", help="turns of each case (default: the benchmark's own number)"
    )
    parser.add_argument("--quick", action="store_true", help="as small as possible, to see that it runs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: profiling/results/NAME.json")
    return parser


def modules() -> dict[str, ModuleType]:
    """Return the benchmarks by name: the modules of the package that have a title."""
    found = {
        info.name: importlib.import_module(f"benchmarks.{info.name}")
        for info in pkgutil.iter_modules(benchmarks.__path__)
    }
    return {name: module for name, module in found.items() if hasattr(module, "TITLE")}


def measure(options: argparse.Namespace, console: Console) -> Result:
    """Run a benchmark, print its table and write its file.

    Raises:
        ValueError: the benchmark does not exist, or takes no changes.
    """
    known = modules()
    if options.name not in known:
        raise ValueError(f"{options.name!r} is not a benchmark; choose from {', '.join(known)}, or compare")
    if options.rest and not hasattr(known[options.name], "TAKES_OVERRIDES"):
        raise ValueError(f"{options.name} takes no changes to the configuration ({' '.join(options.rest)})")
    arguments = Options(options.rounds, options.quick, tuple(options.rest))
    machine = describe_machine()  # with its load before the benchmark adds to it
    rows = known[options.name].run(arguments)
    result = Result(
        name=options.name,
        time=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        machine=machine,
        versions=describe_versions(),
        arguments={"rounds": options.rounds, "quick": options.quick, "overrides": options.rest},
        rows=rows,
    )
    console.print(known[options.name].TITLE, style="bold")
    print_result(result, console)
    path = options.out or RESULTS / f"{options.name}.json"
    result.write(path)
    console.print(f"written to {path}")
    return result


if __name__ == "__main__":
    sys.exit(main())
