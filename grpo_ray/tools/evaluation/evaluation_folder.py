"""The folder of an evaluation: its definition, the responses, and the results.

    evaluation.json     the definition: another evaluation is refused here, the same one is resumed
    examples.parquet    every response (responses.py)
    summary.json        the results
    examples.md         ten responses of each category
    logs/               the actors' output

With several checkpoints each has its own examples and results in a folder of its name, such as `step-000040/`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_ray.records.durable import replacing
from grpo_ray.records.evaluation_summary import EvaluationSummary, summarise
from grpo_ray.records.json_lines import to_json
from grpo_ray.records.resumable_folder import ResumableFolder
from grpo_ray.tools.evaluation.readable import write_examples
from grpo_ray.tools.evaluation.responses import read_outcomes


def evaluation_folder(path: Path) -> ResumableFolder:
    """Return the folder at a path, for an evaluation to claim."""
    return ResumableFolder(path, "evaluation.json", "evaluation", "give another --output")


def read_summary(folder: Path) -> EvaluationSummary | None:
    """Return the summary of a completed evaluation; None: it is not complete."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    return EvaluationSummary(**json.loads(path.read_text(encoding="utf-8"))["summary"])


def write_results(folder: Path, examples: Path, step: int, facts: Mapping[str, Any]) -> EvaluationSummary:
    """Write `summary.json` and `examples.md` from the responses in the file `examples`.

    Args:
        facts: further entries of summary.json, which precede the summary.
    """
    summary = summarise(read_outcomes(examples), step, version=step)
    write_examples(examples, summary, folder / "examples.md")
    data = {**facts, "summary": asdict(summary)}
    with replacing(folder / "summary.json") as partial:  # last: it marks the evaluation as complete
        partial.write_text(json.dumps(to_json(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return summary
