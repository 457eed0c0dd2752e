"""The results of an evaluation: the printed table, and the files of its folder.

    evaluation.json     the definition: another evaluation is refused here, the same one is resumed
    examples.parquet    every response (responses.py)
    summary.json        the results
    examples.md         ten responses of each category
    logs/               the actors' output

With several checkpoints each has its own examples and results in a folder of its name, such as `step-000040/`,
and the folder has their accuracy by step: `curve.csv` and `accuracy.png`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from rich.table import Table

from grpo_ray.errors import RunError, counted
from grpo_ray.records.durable import write_csv, write_text
from grpo_ray.records.episode_metrics import Status
from grpo_ray.records.evaluation_summary import Category, EvaluationSummary, Interval, summarise
from grpo_ray.records.json_lines import to_json
from grpo_ray.records.visible_text import visible
from grpo_ray.tools.drawing.figures import COLORS, new_figure, tidy
from grpo_ray.tools.evaluation.responses import Row, read_outcomes, sample_rows

EXAMPLES_OF_EACH = 10
OWN = "episodes/metrics/"


def _categories(summary: EvaluationSummary) -> Iterator[tuple[Category, str, int]]:
    """Yield the categories with their titles and numbers of responses; the last only if it has any."""
    yield Category.CORRECT, "format 1, answer 1", summary.num_correct
    yield Category.WRONG_ANSWER, "format 1, answer 0", summary.num_wrong_answer
    yield Category.NO_FORMAT, "format 0", summary.num_no_format
    if summary.num_errors:
        yield Category.NOT_GRADED, "not graded", summary.num_errors


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
    for _, title, number in _categories(summary):
        rows.append((title, f"{number:,}", f"{number / summary.num_responses:.1%} of responses"))
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
    for category, title, number in _categories(summary):
        rows = sample_rows(examples_path, category, EXAMPLES_OF_EACH)
        sections.append(f"## {title}: {number:,} of {summary.num_responses:,} responses")
        sections += [_readable(row) for row in rows] or ["None."]
    write_text(path, "\n\n".join(sections) + "\n", fsync=False)


def _readable(row: Row) -> str:
    part = f" of {row['task']}" if row["task"] else ""
    facts = f"reward {row['reward']:g}, {row['num_tokens']} tokens, ended by {row['finish_reason']}"
    if row.get("status") is not None:
        branches = counted(row["num_branches"], "branch", "es")
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


def read_summary(folder: Path) -> EvaluationSummary | None:
    """Return the summary of a completed evaluation; None: it is not complete. A damaged one is a RunError."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        return EvaluationSummary(**json.loads(path.read_text(encoding="utf-8"))["summary"])
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged ({error}); remove it to evaluate again") from None


def write_results(folder: Path, examples: Path, step: int, facts: Mapping[str, Any]) -> EvaluationSummary:
    """Write `summary.json`, where `facts` precede the summary, and `examples.md` from the file `examples`."""
    summary = summarise(read_outcomes(examples), step, version=step)
    write_examples(examples, summary, folder / "examples.md")
    data = {**facts, "summary": asdict(summary)}
    text = json.dumps(to_json(data), indent=1, allow_nan=False) + "\n"
    write_text(folder / "summary.json", text)  # last: it marks the evaluation as complete
    return summary


def plot_curve(summaries: Sequence[EvaluationSummary], title: str, path: Path) -> None:
    """Draw `accuracy.png`, 1200x800: accuracy, pass@n and format rate by step, with 95% bands."""
    figure = new_figure(12, 8)
    axis = figure.subplots()
    k = str(summaries[0].num_samples)
    steps = [s.step for s in summaries]
    _draw(axis, COLORS[2], "--", "format", steps, [(s.format_reward, s.format_interval) for s in summaries])
    if k != "1":
        passes = [(s.pass_at_k[k], s.pass_at_k_intervals[k]) for s in summaries]
        _draw(axis, COLORS[1], ":", f"pass@{k}", steps, passes)
    _draw(axis, COLORS[0], "-", "accuracy", steps, [(s.accuracy, s.accuracy_interval) for s in summaries])
    for s in summaries:
        axis.annotate(
            f"{s.accuracy:.2f}", (s.step, s.accuracy), textcoords="offset points", xytext=(0, -20),
            ha="center", color=COLORS[0], fontsize=12, fontweight="bold",
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )  # fmt: skip
    axis.set_ylim(-0.06, 1.02)
    tidy(axis, "step", f"share ({summaries[0].num_examples:,} prompts x {k})")
    axis.margins(x=0.04)
    axis.legend(loc="best", framealpha=0.85, edgecolor="none", fontsize=12, title="with 95% bands")
    axis.set_title(title, fontsize=14)
    figure.savefig(path)


def _draw(
    axis: Axes, color: str, dash: str, label: str, steps: list[int], points: list[tuple[float, Interval]]
) -> None:
    lows, highs = zip(*(interval for _, interval in points), strict=True)
    axis.fill_between(steps, lows, highs, color=color, alpha=0.15, linewidth=0)
    values = [value for value, _ in points]
    axis.plot(steps, values, dash, color=color, linewidth=2.2, marker="o", markersize=6, label=label)


def write_curve(summaries: Sequence[EvaluationSummary], path: Path) -> None:
    """Write `curve.csv`: one row per checkpoint, with pass@k for each k."""
    rows = [
        {
            "step": s.step, "accuracy": s.accuracy, "accuracy_low": s.accuracy_interval[0],
            "accuracy_high": s.accuracy_interval[1], "format": s.format_reward, "reward": s.reward,
            "mean_response_tokens": s.mean_response_tokens, "truncated_frac": s.truncated_frac,
            "num_errors": s.num_errors, **{f"pass@{k}": value for k, value in s.pass_at_k.items()},
        }
        for s in summaries
    ]  # fmt: skip
    write_csv(path, rows, fsync=False)
