"""An evaluation's folder: what was asked, the responses, and what they came to.

    evaluation.json     what was asked; another evaluation is refused here, an interrupted one goes on
    examples.parquet    every response (responses.py)
    summary.json        the figures
    examples.md         ten responses of each category
    logs/               what the actors wrote

Of several checkpoints each has its own examples and figures in a folder of its name, such as `step-000040/`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_ray.config.schema import leaves
from grpo_ray.errors import RunError
from grpo_ray.telemetry.durable import replacing
from grpo_ray.telemetry.evaluation_summary import EvaluationSummary, summarise
from grpo_ray.telemetry.json_lines import to_json
from grpo_ray.tools.evaluation.readable import write_examples
from grpo_ray.tools.evaluation.responses import read_outcomes


def check_folder(folder: Path, asked: Mapping[str, Any]) -> None:
    """Refuse a folder that is not free for this evaluation, nor holds an earlier start of it.

    Args:
        asked: as much as is known by now; the rest of what the folder holds is not compared.

    Raises:
        RunError: says what it holds.
    """
    path = folder / "evaluation.json"
    if path.exists():
        _check_same(path, asked)
    elif folder.exists() and (not folder.is_dir() or any(e.name != ".lock" for e in folder.iterdir())):
        raise RunError(f"--output: {folder} is not empty, and no evaluation; give another, or move it away")


def claim(folder: Path, asked: Mapping[str, Any]) -> None:
    """Make the folder this evaluation's; raises RunError as `check_folder`."""
    check_folder(folder, asked)
    with replacing(folder / "evaluation.json") as partial:
        partial.write_text(json.dumps(asked, indent=1) + "\n", encoding="utf-8")


def _check_same(path: Path, asked: Mapping[str, Any]) -> None:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        before = leaves({key: value for key, value in before.items() if key in asked})
    except (ValueError, AttributeError) as error:
        raise RunError(f"{path} is not readable ({error}); give another --output") from error
    now = leaves(json.loads(json.dumps(asked)))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            raise RunError(
                f"--output: {path.parent} holds another evaluation, with {key} {before.get(key)!r} and not "
                f"{now.get(key)!r}; give another, or move it away"
            )


def read_summary(folder: Path) -> EvaluationSummary | None:
    """What an evaluation that is over came to; None: it is not over."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    return EvaluationSummary(**json.loads(path.read_text(encoding="utf-8"))["summary"])


def write_results(folder: Path, examples: Path, step: int, facts: Mapping[str, Any]) -> EvaluationSummary:
    """`summary.json` and `examples.md` of the responses in the file `examples`.

    Args:
        facts: what else is to stand in summary.json, above the figures.
    """
    summary = summarise(read_outcomes(examples), step, version=step)
    write_examples(examples, summary, folder / "examples.md")
    data = {**facts, "summary": asdict(summary)}
    with replacing(folder / "summary.json") as partial:  # last: it says that the evaluation is over
        partial.write_text(json.dumps(to_json(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return summary
