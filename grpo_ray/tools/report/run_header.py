"""The head of a run on the web page: settings, ending, facts, warnings, and answers to compare."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.schema import leaves
from grpo_ray.config.section import Section
from grpo_ray.records.json_lines import readable_rows
from grpo_ray.records.readable_rollouts import readable_cells, readable_rollouts
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.records.run_files import RunDirectory, step_name
from grpo_ray.tools.report.rollout_sample import StepFiles
from grpo_ray.tools.report.series import REWARD
from grpo_ray.tools.top.run_view import NUM_STEPS
from grpo_ray.watch.console import settings
from grpo_ray.watch.detectors import KIND
from grpo_ray.watch.run_state import read_state

NUM_SAMPLES = 3  # prompts with answers to compare, here and at the end of a run's output

Row = Mapping[str, Any]
LAG, AGE = "lag/max", "lag/updates/max"


def about(run: RunDirectory, config: Config | None) -> dict[str, str]:
    """Describe the run as labels and texts.

    Raises:
        ValueError: `state.json` is damaged.
    """
    state, facts = read_state(run), {"state": "unknown (there is no state.json)"}
    if state is not None:
        where = f"step {state.now.step:,} of {state.num_steps:,}, {_clock(state.time)}"
        facts["state"] = f"not finished: {state.phase}, {where}"
        if state.ending is not None:
            facts["state"] = ": ".join(filter(None, [f"{state.ending.kind} at {where}", state.ending.text]))
        facts["last start"] = f"{_clock(state.began)}, on {state.host}"
    return facts | dict(settings(config) if config is not None else ())


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def warnings_in(path: Path) -> list[str]:
    """Return the texts of detectors' warnings among the events."""
    return [str(row.get("text")) for row in readable_rows(path) if str(row.get("kind")).startswith(KIND)]


def not_validated(evaluations: Sequence[Row]) -> list[str]:
    """Return a sentence about the last validation if it could not grade everything."""
    row = evaluations[-1] if evaluations else {}
    if not row.get("num_errors"):
        return []
    number, whole = row["num_errors"], row["num_examples"] * row["num_samples"]
    return [f"{number:,} of {whole:,} responses of the validation at step {row['step']:,} could not be graded"]


def validation_samples(run: RunDirectory, steps: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the answers to a few prompts, the same ones, at the first and the last validation with a file."""
    paths = {step: run.evaluations / f"{step_name(step)}.parquet" for step in steps}
    known = [step for step in steps if paths[step].exists()]
    return {
        step: readable_rollouts(read_groups(paths[step]), NUM_SAMPLES) for step in (*known[:1], *known[-1:])
    }


def shown_samples(run: RunDirectory, steps: Sequence[int]) -> list[dict[str, Any]]:
    """Return the answers of each validation that is compared, with its step."""
    return [
        {"step": step, **readable_cells(sample)}
        for step, samples in validation_samples(run, steps).items()
        for sample in samples
    ]


def changed_keys(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the keys with another value than their default, by dotted path."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from changed_keys(value, f"{prefix}{name}.")
        elif value != field.get_default(call_default_factory=True, validated_data=dict(section)):
            yield from leaves(section.model_dump(mode="json", include={name}), prefix)


class RunTotals:
    """Sums and extremes over all steps, and the last ones, noted while the steps are read."""

    def __init__(self) -> None:
        self.last_step: int | None = None
        self.rewards: tuple[float, float] | None = None  # of the first and of the last step that have one
        self.seconds = self.tokens = 0.0
        self.largest: dict[str, float] = {}
        self.latest: deque[Row] = deque(maxlen=NUM_STEPS)

    def noted(self, row: Row) -> Row:
        """Note a step, and return its row."""
        self.last_step = row["step"]
        self.latest.append(row)
        if (reward := row.get(REWARD)) is not None:
            self.rewards = (self.rewards or (reward,))[0], reward
        self.seconds += row.get("timing/step_s") or 0.0
        self.tokens += row.get("throughput/trained_tokens") or 0.0
        for name in (LAG, AGE):
            if (value := row.get(name)) is not None:
                self.largest[name] = max(value, self.largest.get(name, value))
        return row


def run_facts(totals: RunTotals, evaluations: Sequence[Row], files: StepFiles) -> dict[str, str]:
    """Summarize the run as labels and texts."""
    facts = {"steps": f"{totals.last_step:,}" if totals.last_step is not None else "none yet"}
    validated = [(row["step"], row["reward"]) for row in evaluations if row.get("reward") is not None]
    if validated:
        best_step, best = max(validated, key=lambda point: point[::-1])  # of equals the newest, as is kept
        facts["validation reward"] = f"{validated[0][1]:.3f} → {validated[-1][1]:.3f}"
        facts["best"] = f"{best:.3f} at step {best_step:,}"
    if totals.rewards is not None:
        facts["training reward"] = f"{totals.rewards[0]:.3f} → {totals.rewards[1]:.3f}"
    about = "about " if files.are_sampled else ""
    facts["rollouts"] = f"{about}{files.num_rollouts:,}" if files.num_rollouts else "not saved"
    if totals.seconds:
        facts["time in steps"] = _duration(totals.seconds)
        facts["trained"] = f"{totals.tokens / totals.seconds:,.0f} tokens/s"
    if LAG in totals.largest:
        age = f" ({totals.largest[AGE]:g} updates)" if AGE in totals.largest else ""
        facts["largest lag"] = f"{totals.largest[LAG]:g}{age}"
    return facts


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
