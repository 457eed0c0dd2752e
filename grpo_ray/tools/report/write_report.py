"""`grpo-ray report`: the web page of one or several runs, one HTML file that loads nothing from a network."""

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from grpo_ray.errors import RunError, all_of
from grpo_ray.records.durable import write_text
from grpo_ray.records.json_lines import to_json
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.look import ReportOptions
from grpo_ray.tools.report.run_data import POINTS, run_data
from grpo_ray.tools.report.series import PANELS, expanded
from grpo_ray.watch.metrics_catalog import METRICS

WEB = resources.files("grpo_ray.tools.report") / "web"
SCRIPTS = ("elements.js", "chart.js", "stages.js", "ranks.js", "episodes.js", "rollouts.js", "page.js")
MOST_NAMES = 4  # in the page's title
# In JSON these occur only in strings. Escaped, no text of a run can end the script element that contains it, or
# be one that UTF-8 cannot encode.
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
FEWEST_POINTS = 200


def make_page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Make the page of the given `run_data`.

    A run's texts are never parsed as HTML: they are embedded as JSON and become text nodes, and the page's
    Content-Security-Policy allows no script but its own.
    """
    names = [run["name"] for run in runs]
    script = "\n".join(_source(name) for name in SCRIPTS)
    style = _source("page.css")
    columns = {name for run in runs for part in run["series"] for name in part["columns"]}
    panels = [
        {"title": title, "panels": [vars(expanded(each, columns)) for each in group]}
        for title, group in PANELS.items()
    ]
    parts = {
        "title": html.escape(visible(", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} runs")),
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'",
        "style": style,
        "data": embedded_json({"runs": runs, "panels": panels, "metrics": METRICS}),
        "script": script,
    }
    # In one pass, so that a run's text that looks like one of the names is left alone.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


def embedded_json(value: Any) -> str:
    """Encode as JSON that is safe in a script element, with any text in its strings."""
    text = json.dumps(to_json(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _source(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def report(options: ReportOptions) -> Path:
    """Write the page and return its path.

    Raises:
        RunError: a folder is not a run, or there is no such checkpoint.
        ValueError: a file of a run is damaged.
    """
    paths = [Path(run).expanduser() for run in options.runs]
    runs = list(map(RunDirectory, paths))
    all_of(*[partial(run.check_is_run, "to report on") for run in runs], lambda: _check_distinct(paths))
    output = _output(options, paths)
    number = len(paths)
    bounds = max(FEWEST_POINTS, POINTS // number), max(1, options.num_rollouts // number), options.seed
    trusted = options.trust_remote_code, options.run_reward_code
    data = [
        run_data(run, name, options.log_ratio, *trusted, *bounds)
        for run, name in zip(runs, names_of(paths), strict=True)
    ]
    try:
        write_text(output, make_page(data), fsync=False)
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
