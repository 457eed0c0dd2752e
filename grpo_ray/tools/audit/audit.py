"""The audit of a run's files: every prompt trained once, within the lag bound, and with the right reward.

Nothing here trusts the program that wrote the files: lags, rewards, advantages and counts are recomputed from
tokens and texts. That the texts are those of the tokens is not checked. Every problem is one line of text.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyarrow import ArrowInvalid

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config, make_config
from grpo_ray.config.user_code import import_from
from grpo_ray.errors import RunError
from grpo_ray.records.episode_columns import NAMES
from grpo_ray.records.evaluation_summary import summarise_groups
from grpo_ray.records.json_lines import STEP, StepLines, read_lines
from grpo_ray.records.rollout_log import read_groups, read_rollouts
from grpo_ray.records.run_files import RunDirectory, check_dumped, files_by_step, step_name
from grpo_ray.rewards.user_function import own_functions
from grpo_ray.tasks.input_digests import edited_rewards
from grpo_ray.tools.audit.checkpoint import CheckpointFacts, audit_checkpoint
from grpo_ray.tools.audit.epochs import audit_epochs
from grpo_ray.tools.audit.rollouts import (
    GroupPrompt,
    Regrader,
    RolloutFacts,
    RolloutRows,
    audit_evaluation,
    audit_step,
)
from grpo_ray.tools.trust import IGNORED

Row = dict[str, Any]
History = list[tuple[int, Config]]  # each configuration with the last step that it was used for
COLUMNS = (
    "step", "use", "group_id", "sample", "task", "prompt", "response", "ground_truth", "reward",
    "format_reward", "answer_reward", "advantage", "error", "num_tokens", "finish_reason", "min_version",
    "max_version", "generator", "prompt_token_ids", "token_ids", "logprobs", "versions",
)  # fmt: skip
"""The columns that every file of rollouts has, docs/rollouts.md."""


@dataclass
class AuditReport:
    """The size of what was audited, and the problems found."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what could not be audited, and why
    num_steps: int = 0
    num_groups: int = 0
    num_completions: int = 0
    num_evaluations: int = 0
    num_errors: int = 0  # responses that could not be graded
    num_skipped_updates: int = 0
    set_aside: tuple[int, ...] = ()

    @property
    def is_clean(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [
            f"{self.num_steps} steps, {self.num_groups} groups, {self.num_completions} completions, "
            f"{self.num_evaluations} evaluations; {self.num_errors} responses not graded, "
            f"{self.num_skipped_updates} updates skipped, {len(self.set_aside)} groups set aside"
        ]
        lines += [f"problem: {text}" for text in self.problems] or ["no problem"]
        return "\n".join(lines + [f"note: {text}" for text in self.notes])


def audit(run: RunDirectory, trust_remote_code: bool = False, run_reward_code: bool = False) -> AuditReport:
    """Audit the files of a run that is not being trained at the moment.

    Args:
        trust_remote_code: run the Python code of the run's model, if its tokenizer is needed.
        run_reward_code: import and call reward functions that the run's configuration names, and the one
            that makes the examples of episodes.

    Raises:
        OSError, ValueError: the configuration or a log cannot be read at all.
    """
    own = load_config(run.config_path)
    config = own.changed(model={"trust_remote_code": trust_remote_code})
    history = [*_earlier_configs(run), (sys.maxsize, config)]
    metrics = StepLines(run.metrics_path)
    report = AuditReport(num_steps=len(metrics))
    if run_reward_code:
        import_from(run.given)
        for reward in config.rewards.values():
            own_functions(reward)  # imports them
    try:
        check_dumped(run.config_path)
        report.notes += edited_rewards(run, config) if run_reward_code else []
    except RunError as error:
        report.problems.append(str(error).partition(". ")[0])
    if own.model.trust_remote_code and not trust_remote_code:
        report.notes.append(IGNORED)
    last = max(metrics.steps, default=0)
    is_finished = last >= config.algorithm.num_steps
    checkpoint = audit_checkpoint(run, last, is_finished)
    if not is_finished:
        ahead = f" (a resume writes the line of step {checkpoint.step})" if checkpoint.step > last else ""
        report.notes.append(f"the run is at step {last} of {config.algorithm.num_steps}{ahead}")
    report.problems += _audit_lines(metrics.written.tolist(), checkpoint.step)
    report.problems += checkpoint.problems
    report.set_aside = tuple(sorted(checkpoint.set_aside))
    grader = Regrader([config for _, config in history], run_reward_code)
    report.notes += grader.notes
    try:
        if all(config.run.save_rollouts for _, config in history):
            _audit_training(run, history, metrics, checkpoint, grader, report, run_reward_code)
        else:
            report.notes.append("run.save_rollouts is false: what was trained cannot be audited")
        _audit_evaluations(run, history, last, is_finished, grader, report)
    finally:
        grader.grader.close()
    report.problems += _audit_skipped(run, metrics, report)
    if is_finished:
        report.problems += _leftovers(run)
    return report


def _earlier_configs(run: RunDirectory) -> History:
    """Return the configurations that a resume has replaced, and until which step."""
    history: History = []
    for event in _events(run, "config_changed"):
        if "before" in event:  # not in runs of earlier releases
            step = event["step"]  # the later ones were trained again, if there were any
            history = [(min(last, step), config) for last, config in history]
            history.append((step, make_config(event["before"], (), run.events_path)))
    return history


def _events(run: RunDirectory, kind: str) -> list[Row]:
    events = read_lines(run.events_path, fields={"kind": str, **STEP})
    return [event for event in events if event["kind"] == kind]


def _configs_until(history: History, step: int) -> list[Config]:
    """Return the configurations that the run had had when it trained a step, that of the step last."""
    current = next(number for number, (last, _) in enumerate(history) if step <= last)
    return [config for _, config in history[: current + 1]]


def _audit_lines(steps: list[int], checkpoint_step: int) -> list[str]:
    """Check that every step has one line, in order; that of the checkpoint's step may be yet to come."""
    expected = list(range(1, max([*steps, checkpoint_step - 1]) + 1))
    if steps == expected:
        return []
    counts = Counter(steps)
    problems = [f"metrics.jsonl: step {step} has no line" for step in expected if step not in counts]
    problems += [f"metrics.jsonl: step {step} has {n} lines" for step, n in counts.items() if n > 1]
    return problems or ["metrics.jsonl: its lines are not in the order of the steps"]


def _audit_training(
    run: RunDirectory, history: History, metrics: StepLines, checkpoint: CheckpointFacts, grader: Regrader,
    report: AuditReport, run_code: bool,
) -> None:  # fmt: skip
    """Check that each step's file has its groups, whole, within the lag bound, and correctly rewarded."""
    config = history[-1][1]
    prompts: dict[int, GroupPrompt] = {}
    distinct: dict[GroupPrompt, GroupPrompt] = {}  # an epoch asks all of them again
    trained: Counter[int] = Counter()
    uses: Counter[int] = Counter()  # number of batches that a group has been in
    dropped: set[int] = set()
    due: set[int] = set()  # groups that the checkpoint must have as trained or dropped
    audited: set[int] = set()
    for row in _with_line_to_come(metrics, checkpoint):
        step, path = row["step"], run.rollouts_path(row["step"])
        if not path.exists():
            if step <= checkpoint.step:  # later ones may not have been written yet when the run ended
                report.problems.append(f"{path.name}: step {step} was trained and has no rollouts")
            continue
        try:
            rows = _rows_of(path, path.name)
        except ArrowInvalid as error:
            is_ahead = step > checkpoint.step
            lost = "a resume removes it and trains the step again" if is_ahead else "its rows are lost"
            report.problems.append(f"{path.name} is damaged, and {lost}: {error}")
            continue
        facts = audit_step(rows, row, _configs_until(history, step), grader)
        audited.add(step)
        _add(report, facts)
        report.num_groups += len(facts.prompts)
        report.num_completions += facts.num_completions
        trained.update(facts.trained)
        report.problems += [
            f"{path.name}: group {group} is replayed with use {use} after use {uses[group]}"
            for group, use in facts.replayed.items()
            if not 0 < uses[group] == use - 1
        ]
        uses.update([*facts.trained, *facts.replayed])
        dropped |= set(facts.dropped)
        if row["step"] <= checkpoint.step:
            due |= set(facts.prompts)
        prompts |= {group: distinct.setdefault(asked, asked) for group, asked in facts.prompts.items()}
    report.problems += [f"group {group} was trained {n} times" for group, n in trained.items() if n > 1]
    both = sorted(dropped & trained.keys())
    report.problems += [f"group {group} was both trained and left out" for group in both]
    last = max(metrics.steps, default=0)
    if last >= config.algorithm.num_steps:
        late = [path.name for step, path in files_by_step(run.rollouts).items() if step > last]
        report.problems += [f"{name}: rollouts of a step that has no line in metrics.jsonl" for name in late]
    if unknown := sorted(set(range(1, checkpoint.step + 1)) - audited):
        steps = ", ".join(map(str, unknown[:10]))
        report.notes.append(f"what was trained at steps {steps} is lost, so groups and epochs are not counted")
        return
    report.problems += _audit_account(checkpoint, due)
    problems, notes = audit_epochs(config, prompts, checkpoint, run_code)
    report.problems += problems
    report.notes += notes


def _rows_of(path: Path, name: str) -> RolloutRows:
    """Read a file of rollouts; raises ArrowInvalid if it is damaged, or lacks a column that it needs."""
    rows = read_rollouts(path)
    needed = (*COLUMNS, *NAMES) if rows and "status" in rows[0] else COLUMNS
    if lacking := [column for column in needed if rows and column not in rows[0]]:
        raise ArrowInvalid(f"{path}: it has no column {lacking[0]}")
    return RolloutRows(name, rows)


def _with_line_to_come(metrics: StepLines, checkpoint: CheckpointFacts) -> Iterator[Row]:
    """Yield the lines by step, with that of the checkpoint's step if an interrupted run had not written it."""
    yield from metrics
    if checkpoint.metrics and checkpoint.step > max(metrics.steps, default=0):
        yield {"step": checkpoint.step, **checkpoint.metrics}


def _audit_account(checkpoint: CheckpointFacts, due: set[int]) -> Iterator[str]:
    """Check that every group taken so far is in the rollouts, set aside, or unfinished in the checkpoint."""
    if checkpoint.next_group_id is None:
        return
    done = due | checkpoint.set_aside
    both = sorted(done & checkpoint.unfinished)
    missing = sorted(set(range(checkpoint.next_group_id)) - done - checkpoint.unfinished)
    if both:
        yield f"groups {both[:10]} are done, but unfinished in the checkpoint"
    if missing:
        yield f"groups {missing[:10]} are lost: neither trained nor in the checkpoint"


def _add(report: AuditReport, facts: RolloutFacts) -> None:
    report.problems += facts.problems
    report.notes += facts.notes
    report.num_errors += facts.num_errors


def _audit_evaluations(
    run: RunDirectory, history: History, last: int, is_finished: bool, grader: Regrader, report: AuditReport
) -> None:
    """Check that each due step has one evaluation, with correct rewards and a summary that matches them."""
    summaries = read_lines(run.evaluations_summary_path, fields=STEP)
    steps = Counter(row["step"] for row in summaries)
    steps_so_far = range(last + 1 if last else 0)  # the first validation may not have been reached
    due = {s for s in steps_so_far if s % _configs_until(history, s)[-1].evaluation.every_num_steps == 0}
    due |= {last} if is_finished else set()
    due -= {event["validation_step"] for event in _events(run, "not_evaluated")}  # a preemption left no time
    report.num_evaluations = len(summaries)
    report.problems += [f"no evaluation at step {step}" for step in sorted(due - steps.keys())]
    report.problems += [f"{n} evaluations at step {step}" for step, n in steps.items() if n > 1]
    lost = {event["validation_step"] for event in _events(run, "responses_lost")}
    prompts: dict[int, GroupPrompt] = {}
    for summary in summaries:
        file = run.evaluations / f"{step_name(summary['step'])}.parquet"
        if not file.exists():
            is_lost = summary["step"] in lost
            notes = report.notes if is_lost else report.problems
            notes.append(f"evaluations/{file.name} is missing" + is_lost * ": the disk had no room")
            continue
        try:
            rows = _rows_of(file, f"evaluations/{file.name}")
        except ArrowInvalid as error:
            report.problems.append(f"evaluations/{file.name}: {error}")
            continue
        # An interrupted one is repeated by the resume, with the values of the step after.
        step = summary["step"]
        around = [_configs_until(history, step)[-1], _configs_until(history, step + 1)[-1]]
        around += [config for until, config in history if until == step]
        found = _summary_of(file, step)
        distinct = {id(config): config for config in around}.values()
        facts = [audit_evaluation(rows, summary, found, config, grader) for config in distinct]
        best = min(facts, key=lambda found: len(found.problems))
        _add(report, best)
        prompts = prompts or best.prompts
        if len(history) == 1 and best.prompts != prompts:  # a resume may change their number
            report.problems.append(f"{rows.name}: has other prompts than the first validation")


def _summary_of(file: Path, step: int) -> Row | None:
    """Return the summary of a validation's groups; None if they are damaged or not of one size."""
    try:
        return asdict(summarise_groups(step, read_groups(file)))
    except (ValueError, AssertionError):
        return None


def _audit_skipped(run: RunDirectory, lines: StepLines, report: AuditReport) -> list[str]:
    """Check that every non-finite update was skipped and counted, and that only skipped batches are kept."""
    needed = ("optim/grad_norm", "optim/skipped_updates")
    metrics = [{name: row[name] for name in ("step", *needed) if name in row} for row in lines]
    lacking = [f"step {row['step']}: its line lacks {n}" for row in metrics for n in needed if n not in row]
    skipped = {row["step"] for row in metrics if row.get("optim/skipped_updates")}
    report.num_skipped_updates = int(sum(row.get("optim/skipped_updates", 0) for row in metrics))
    norms = {row["step"]: row.get("optim/grad_norm", 0.0) for row in metrics}  # nan is null in JSON
    infinite = [step for step, norm in norms.items() if norm is None or not math.isfinite(norm)]
    last = max(norms, default=0)  # a resume writes the line of a later step
    kept = files_by_step(run.skipped).items()
    unexplained = [path.name for step, path in kept if step <= last and step not in skipped]
    used = [step for step in infinite if step not in skipped]
    problems = [f"skipped/{name}: no update of that step was skipped" for name in unexplained]
    problems += [f"step {step}: its gradient is not finite and was used" for step in used]
    return lacking + problems


def _leftovers(run: RunDirectory) -> list[str]:
    """Return problems with files that a clean end would not have left."""
    files = [path for path in run.checkpoints.glob("*") if not re.fullmatch(r"step-\d{6,}", path.name)]
    for folder in (run.rollouts, run.evaluations, run.skipped, run.path):
        files += list(folder.glob(".*.partial"))
    return [f"{path.relative_to(run.path)} is left over" for path in sorted(files)]
