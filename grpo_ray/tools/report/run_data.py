"""The data of one run for the web page, as plain values for JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.config.loading import read_config
from grpo_ray.config.schema import leaves
from grpo_ray.telemetry.run_files import RunDirectory, last_of_each_step, read_metrics
from grpo_ray.tools.report.panels import REWARD, VALIDATION
from grpo_ray.tools.report.rollout_rows import show_rollouts
from grpo_ray.tools.report.rollout_sample import StepFile, sample_rollouts, step_files
from grpo_ray.tools.report.series import make_series
from grpo_ray.tools.report.stage_times import stage_times

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Bounds:
    """Limits on how much of one run goes into the page."""

    max_points: int
    max_rollouts: int
    seed: int


def run_data(run: RunDirectory, name: str, bounds: Bounds, log_ratio: str | None) -> dict[str, Any]:
    """Collect the run's metrics, sampled rollouts and configuration.

    Args:
        log_ratio: as for `show_rollouts`.

    Raises:
        RunError, ValueError: a file of the run is damaged, or there is no such checkpoint.
    """
    metrics = last_of_each_step(run.metrics_path)
    evaluations = [
        {**row, VALIDATION: row.get("reward")} for row in last_of_each_step(run.evaluations_summary_path)
    ]
    files = step_files(run)
    training = make_series(metrics, {REWARD: _errors(files)}, bounds.max_points)
    if evaluations:  # they start at step 0, and have standard errors
        training.columns.pop(VALIDATION, None)
    validation = make_series(
        [{"step": row["step"], VALIDATION: row[VALIDATION]} for row in evaluations],
        {VALIDATION: {row["step"]: row["reward_standard_error"] for row in evaluations
                      if row.get("reward_standard_error") is not None}},
        bounds.max_points,
    )  # fmt: skip
    sample = sample_rollouts(files, bounds.max_rollouts, bounds.seed)
    shown = show_rollouts(run, sample, log_ratio)
    return {
        "name": name,
        "facts": _facts(run, metrics, evaluations, sample.num_rollouts),
        "series": [asdict(training), asdict(validation)],
        "stages": stage_times(training.columns),
        "rollouts": shown.rows,
        "sample": {
            "num_rollouts": sample.num_rollouts,
            "num_steps": sample.num_steps,
            "num_sampled_steps": sample.num_sampled_steps,
            "seed": sample.seed,
        },
        "checkpoint": shown.checkpoint,
        "notices": shown.notices,
        "config": {key: _text(value) for key, value in leaves(read_config(run.config_path)).items()},
        "config_yaml": run.config_path.read_text(encoding="utf-8"),
    }


def _errors(files: Sequence[StepFile]) -> dict[int, float]:
    return {file.step: file.standard_error for file in files if file.standard_error is not None}


def _facts(run: RunDirectory, metrics: Rows, evaluations: Rows, num_rollouts: int) -> dict[str, str]:
    """Summarize the run as labels and texts."""
    facts = {"steps": f"{metrics[-1]['step']:,}" if metrics else "none yet"}
    validated = [(row["step"], row["reward"]) for row in evaluations if row.get("reward") is not None]
    if validated:
        best_step, best = max(validated, key=lambda point: point[1])
        facts["validation reward"] = f"{validated[0][1]:.3f} → {validated[-1][1]:.3f}"
        facts["best"] = f"{best:.3f} at step {best_step:,}"
    if rewards := _known(metrics, REWARD):
        facts["training reward"] = f"{rewards[0]:.3f} → {rewards[-1]:.3f}"
    facts["rollouts"] = f"{num_rollouts:,}" if num_rollouts else "not saved"
    if seconds := sum(_known(metrics, "timing/step_s")):
        facts["time in steps"] = _duration(seconds)
        facts["trained"] = f"{sum(_known(metrics, 'throughput/trained_tokens')) / seconds:,.0f} tokens/s"
    if lags := _known(metrics, "lag/max"):
        facts["largest lag"] = f"{max(lags):g}"
    if events := read_metrics(run.events_path) if run.events_path.exists() else []:
        facts["events"] = f"{len(events):,}, see {run.events_path.name}"
    return facts


def _text(value: Any) -> str:
    """Write a value as YAML would."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _known(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
