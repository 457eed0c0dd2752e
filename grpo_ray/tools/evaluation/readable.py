"""An evaluation for people to read: the printed table, and sampled examples of each category."""

import re
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from grpo_ray.records.durable import replacing
from grpo_ray.records.episode_metrics import Status, counted
from grpo_ray.records.evaluation_summary import Category, EvaluationSummary, Interval
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.evaluation.responses import Row, sample_rows

EXAMPLES_OF_EACH = 10
OWN = "episodes/metrics/"

TITLES = {
    Category.CORRECT: "format 1, answer 1",
    Category.WRONG_ANSWER: "format 1, answer 0",
    Category.NO_FORMAT: "format 0",
    Category.NOT_GRADED: "not graded",
}


def counts(summary: EvaluationSummary) -> dict[Category, int]:
    return {
        Category.CORRECT: summary.num_correct,
        Category.WRONG_ANSWER: summary.num_wrong_answer,
        Category.NO_FORMAT: summary.num_no_format,
        Category.NOT_GRADED: summary.num_errors,
    }


def summary_table(summary: EvaluationSummary) -> Table:
    """Return the results with their 95% intervals over prompts."""
    table = Table.grid(padding=(0, 2))
    examples = f"{summary.num_examples:,} prompts x {summary.num_samples}"
    rows = [("accuracy", _with_interval(summary.accuracy, summary.accuracy_interval), examples)]
    for k, value in summary.pass_at_k.items():
        if k != "1":  # pass@1 is the accuracy
            rows.append((f"pass@{k}", _with_interval(value, summary.pass_at_k_intervals[k]), ""))
    rows.append(("format", _with_interval(summary.format_reward, summary.format_interval), ""))
    rows.append(("mean reward", f"{summary.reward:.4f} ± {summary.reward_standard_error:.4f}", ""))
    for task, accuracy in summary.accuracy_by_task.items():
        rows.append((f"accuracy {task}", f"{accuracy:.4f}", ""))
    for category, number in counts(summary).items():
        if number or category != Category.NOT_GRADED:
            share = f"{number / summary.num_responses:.1%} of responses"
            rows.append((TITLES[category], f"{number:,}", share))
    tokens = f"mean {summary.mean_response_tokens:.1f}, median {summary.median_response_tokens:g}"
    rows.append(("response tokens", f"{tokens}, longest {summary.max_response_tokens}", ""))
    rows.append(("truncated", f"{summary.truncated_frac:.1%}", ""))
    rows += _episode_rows(summary.episodes)
    for row in rows:
        table.add_row(f"  {row[0]}", *row[1:])
    return table


def _episode_rows(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """Return the rows about episodes, by their metrics; none without."""
    if not metrics:
        return []
    turns, seconds = ([metrics[f"episodes/{name}/{stat}"] for stat in ("mean", "max")]
                      for name in ("turns", "seconds"))  # fmt: skip
    ends = [(name, metrics.get(f"episodes/status/{name}", 0.0)) for name in Status]
    own = {name.removeprefix(OWN): value for name, value in metrics.items() if name.startswith(OWN)}
    return [
        ("turns", f"mean {turns[0]:.1f}, most {turns[1]:g}", ""),
        *((name, f"{share:.1%} of episodes", "") for name, share in ends if share),
        ("seconds", f"mean {seconds[0]:.1f}, longest {seconds[1]:.1f}", ""),
        *((f"mean {name}", f"{value:g}", "") for name, value in own.items()),
    ]


def _with_interval(value: float, interval: Interval) -> str:
    return f"{value:.4f} [{interval[0]:.4f}, {interval[1]:.4f}]"


def write_examples(examples_path: Path, summary: EvaluationSummary, path: Path) -> None:
    """Write `examples.md`: ten responses of each category, drawn with a fixed seed."""
    sections = ["# Sampled examples"]
    for category, number in counts(summary).items():
        if not number and category == Category.NOT_GRADED:
            continue
        rows = sample_rows(examples_path, category, EXAMPLES_OF_EACH)
        sections.append(f"## {TITLES[category]}: {number:,} of {summary.num_responses:,} responses")
        sections += [_readable(row) for row in rows] or ["None."]
    with replacing(path, fsync=False) as partial:
        partial.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _readable(row: Row) -> str:
    part = f" of {row['task']}" if row["task"] else ""
    facts = f"reward {row['reward']:g}, {row['num_tokens']} tokens, ended by {row['finish_reason']}"
    if row.get("status") is not None:
        branches = counted(row["num_branches"], "branch", "branches")
        facts += f", {counted(row['num_turns'], 'turn')}, {branches}, {row['status']}"
    lines = [f"### Example {row['example_id']}{part}, sample {row['sample']}", facts]
    if row["error"]:
        lines.append(f"Not graded: {_fenced(row['error'])}")
    texts = {"Prompt": row["prompt"], "Response": row["response"], "Ground truth": row["ground_truth"]}
    lines += [f"{title}:\n\n{_fenced(text)}" for title, text in texts.items()]
    return "\n\n".join(lines)


def _fenced(text: str) -> str:
    """Return the text as a code block, whatever Markdown it contains."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{visible(text)}\n{fence}"
