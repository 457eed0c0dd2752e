"""The end of a run's output: the reward curve, a few rollouts, and the next commands."""

import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.json_lines import StepLines, readable_rows
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.drawing.figures import draw_reward_curve
from grpo_ray.tools.drawing.terminal_curve import terminal_curve
from grpo_ray.tools.report.run_header import validation_samples, warnings_in

OWN = "docs/own-data.md"


def print_ending(print_line: Callable[[str], None], run: RunDirectory) -> None:
    """Print the ending from the run's files alone, so that a resumed run shows its whole history."""
    curve = run.path / "reward_curve.png"
    try:
        draw_reward_curve(run.metrics_path, run.evaluations_summary_path).savefig(curve)
    except OSError as error:  # such as a full disk; the run itself is saved
        print_line(f"\n{curve} could not be drawn: {error}")
    rows = read_metrics(run.evaluations_summary_path)
    rewards = [(row["step"], row["reward"]) for row in rows if row["reward"] is not None]
    print_line(f"\n{terminal_curve(rewards, title='validation reward')}")
    samples_of: dict[int, list[dict[str, Any]]] = {}
    try:
        samples_of = validation_samples(run, [step for step, _ in rewards])
    except (OSError, ValueError) as error:  # damaged since; the run itself is saved
        print_line(f"\nThe validation samples cannot be read: {error}")
    for step, samples in samples_of.items():
        print_line(f"\nSamples at step {step}:")
        for sample in samples:
            reward = f"{sample['reward']:g}" if sample["error"] is None else "none (not graded)"
            print_line(f"  reward {reward}  {sample['prompt']!r} -> {sample['response']!r}")
    _print_events(print_line, run)
    print_line(f"\nReward curve   {curve}")
    print_line(f"Run directory  {run.path}  (metrics.jsonl, rollouts/, evaluations/, checkpoints/, logs/)")
    _print_commands(print_line, run)


def _print_events(print_line: Callable[[str], None], run: RunDirectory) -> None:
    """Print the warnings of detectors, and the groups that were given up."""
    for text in warnings_in(run.events_path):
        print_line(f"\nWarning at {text}")
    events = readable_rows(run.events_path)
    group_ids = sorted({event["group_id"] for event in events if event.get("kind") == "set_aside"})
    with suppress(OSError):
        found = CheckpointStore(run).all(reads_files=False, is_strict=True)
        for newest in found[-1:]:  # a restore undoes events
            group_ids = sorted(newest.state.ledger.get("set_aside", ()))
    if group_ids:
        print_line(
            f"\nSet aside, never finished: groups {', '.join(map(str, group_ids))} (see {run.events_path})"
        )


def _print_commands(print_line: Callable[[str], None], run: RunDirectory) -> None:
    command = sys.argv[0] if Path(sys.argv[0]).name == "grpo-ray" else "grpo-ray"
    steps = StepLines(run.metrics_path).steps
    num_steps, path = steps[-1] if steps else 0, shlex.quote(str(run.path))
    print_line(f"\nAll {num_steps} steps are done. Next:")
    print_line(f"  {command} report {path}    # its web page")
    print_line(f"  {command} top {path}    # where its time went")
    if Path(OWN).exists():  # not in other folders than the source tree
        print_line(f"  {OWN}    # your own model and data")
    resume = run.resume_command.removeprefix("grpo-ray ")
    print_line(f"  {command} {resume} algorithm.num_steps={2 * num_steps}    # train longer")
