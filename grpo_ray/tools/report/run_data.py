"""The data of one run for the web page, as plain values for JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from grpo_ray.config.loading import read_config
from grpo_ray.config.schema import leaves
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.telemetry.step_lines import StepLines
from grpo_ray.tools.report.panels import REWARD, VALIDATION
from grpo_ray.tools.report.rank_totals import RankTotals
from grpo_ray.tools.report.rollout_rows import show_rollouts
from grpo_ray.tools.report.rollout_sample import sample_rollouts, step_files
from grpo_ray.tools.report.run_facts import RunTotals, run_facts
from grpo_ray.tools.report.series import make_series
from grpo_ray.tools.report.stage_times import stage_times


@dataclass(frozen=True)
class Bounds:
    """Limits on how much of one run goes into the page."""

    max_points: int
    max_rollouts: int
    seed: int


def run_data(
    run: RunDirectory, name: str, bounds: Bounds, log_ratio: str | None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Collect the run's metrics, sampled rollouts and configuration.

    Args:
        log_ratio, trust_remote_code: as for `show_rollouts`.

    Raises:
        RunError, ValueError: a file of the run is damaged, or there is no such checkpoint.
    """
    metrics, totals, ranks = StepLines(run.metrics_path), RunTotals(), RankTotals()
    evaluations = [{**row, VALIDATION: row.get("reward")} for row in StepLines(run.evaluations_summary_path)]
    files = step_files(run)
    rows = map(ranks.noted, map(totals.noted, metrics))
    training = make_series(rows, len(metrics), {REWARD: files.standard_errors()}, bounds.max_points)
    if evaluations:  # they start at step 0, and have standard errors
        training.columns.pop(VALIDATION, None)
    validation = make_series(
        [{"step": row["step"], VALIDATION: row[VALIDATION]} for row in evaluations],
        len(evaluations),
        {VALIDATION: {row["step"]: row["reward_standard_error"] for row in evaluations
                      if row.get("reward_standard_error") is not None}},
        bounds.max_points,
    )  # fmt: skip
    sample = sample_rollouts(files, bounds.max_rollouts, bounds.seed)
    shown = show_rollouts(run, sample, log_ratio, trust_remote_code)
    return {
        "name": name,
        "facts": run_facts(run, totals, evaluations, files),
        "series": [asdict(training), asdict(validation)],
        "stages": stage_times(training.columns),
        "ranks": ranks.rows(),
        "rollouts": shown.rows,
        "sample": {
            "num_rollouts": sample.num_rollouts,
            "num_steps": sample.num_steps,
            "num_sampled_steps": sample.num_sampled_steps,
            "num_inspected_steps": len(files.inspected),
            "seed": sample.seed,
        },
        "checkpoint": shown.checkpoint,
        "notices": shown.notices,
        "config": {key: _text(value) for key, value in leaves(read_config(run.config_path)).items()},
        "config_yaml": run.config_path.read_text(encoding="utf-8"),
    }


def _text(value: Any) -> str:
    """Write a value as YAML would."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
