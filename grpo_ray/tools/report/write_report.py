"""`grpo-ray report`: write the web page of one or several runs."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from grpo_ray.errors import RunError, all_of
from grpo_ray.records.durable import replacing
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.report.command import ReportOptions
from grpo_ray.tools.report.page import make_page
from grpo_ray.tools.report.run_data import Bounds, run_data

POINTS = 3000  # per metric, over all runs
FEWEST_POINTS = 200


def report(options: ReportOptions) -> Path:
    """Write the page and return its path.

    Raises:
        RunError: a folder is not a run, or there is no such checkpoint.
        ValueError: a file of a run is damaged.
    """
    paths = [Path(run).expanduser() for run in options.runs]
    all_of(*[lambda path=path: _check_run(path) for path in paths], lambda: _check_distinct(paths))
    output = _output(options, paths)
    number = len(paths)
    bounds = Bounds(max(FEWEST_POINTS, POINTS // number), max(1, options.num_rollouts // number), options.seed)
    data = [
        run_data(RunDirectory(path), name, bounds, options.log_ratio, options.trust_remote_code)
        for path, name in zip(paths, names_of(paths), strict=True)
    ]
    try:
        with replacing(output, fsync=False) as partial:
            partial.write_text(make_page(data), encoding="utf-8")
    except OSError as error:
        raise RunError(f"--output: {output} cannot be written: {error}") from error
    return output


def names_of(paths: Sequence[Path]) -> list[str]:
    """Name each run by its folder, with as many parent folders as are needed to distinguish it."""
    parts = [path.resolve().parts for path in paths]
    names = [part[-1] for part in parts]
    for depth in range(2, max(map(len, parts)) + 1):
        is_taken = Counter(names)
        names = ["/".join(p[-depth:]) if is_taken[n] > 1 else n for n, p in zip(names, parts, strict=True)]
    return names


def _check_run(path: Path) -> None:
    if not (path / "config.yaml").is_file():
        raise RunError(f"{path}: not a run to report on (it has no config.yaml)")


def _check_distinct(paths: Sequence[Path]) -> None:
    for path, times in Counter(path.resolve() for path in paths).items():
        if times > 1:
            raise RunError(f"{path}: given {times} times; give each run once")


def _output(options: ReportOptions, paths: Sequence[Path]) -> Path:
    if options.output is None:
        folder = paths[0] if len(paths) == 1 else paths[0].resolve().parent
        return folder / "report.html"
    output = Path(options.output).expanduser()
    if output.is_dir() or not output.parent.is_dir():
        what = "is a folder" if output.is_dir() else f"cannot be written: there is no folder {output.parent}"
        raise RunError(f"--output: {output} {what}; give a file such as report.html")
    return output
