"""The web page of runs: one self-contained HTML file that loads nothing from a network."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from grpo_ray.records.json_lines import to_json
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.report.panels import PANELS, expanded
from grpo_ray.watch.metrics_catalog import METRICS

WEB = resources.files("grpo_ray.tools.report") / "web"
SCRIPTS = ("elements.js", "chart.js", "stages.js", "ranks.js", "episodes.js", "rollouts.js", "page.js")
MOST_NAMES = 4  # in the page's title
# In JSON these occur only in strings. Escaped, no text of a run can end the script element that contains it, or
# be one that UTF-8 cannot encode.
UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def make_page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Make the page of the given `run_data`.

    A run's texts are never parsed as HTML: they are embedded as JSON and become text nodes, and the page's
    Content-Security-Policy allows no script but its own.
    """
    names = [run["name"] for run in runs]
    script = "\n".join(_source(name) for name in SCRIPTS)
    style = _source("page.css")
    parts = {
        "title": html.escape(visible(", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} runs")),
        "policy": f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'",
        "style": style,
        "data": embedded_json({"runs": runs, "panels": _panels(runs), "metrics": METRICS}),
        "script": script,
    }
    # In one pass, so that a run's text that looks like one of the names is left alone.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _source("page.html"))


def embedded_json(value: Any) -> str:
    """Encode as JSON that is safe in a script element, with any text in its strings."""
    text = json.dumps(to_json(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _panels(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = {name for run in runs for part in run["series"] for name in part["columns"]}
    sections = {title: [expanded(panel, names) for panel in panels] for title, panels in PANELS.items()}
    return [
        {"title": title, "panels": [{**vars(panel), "series": list(panel.series)} for panel in panels]}
        for title, panels in sections.items()
    ]


def _source(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
