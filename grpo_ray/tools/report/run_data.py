"""The data of one run for the web page, as plain values for JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config, read_config
from grpo_ray.config.schema import leaves
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.look import ReportOptions
from grpo_ray.tools.report.rollout_rows import show_rollouts
from grpo_ray.tools.report.rollout_sample import sample_rollouts, step_files
from grpo_ray.tools.report.run_header import (
    RunTotals,
    about,
    changed_keys,
    not_validated,
    run_facts,
    shown_samples,
    warnings_in,
)
from grpo_ray.tools.report.series import REWARD, VALIDATION, RankTotals, make_series, stage_times
from grpo_ray.tools.top.bottleneck import Problems, bottleneck, rank_figures, rank_hint, steady

POINTS = 3000  # per metric, over all runs


def run_data(
    run: RunDirectory, name: str, log_ratio: str | None = None, trust_remote_code: bool = False,
    run_reward_code: bool = False, max_points: int = POINTS, max_rollouts: int = ReportOptions.num_rollouts,
    seed: int = ReportOptions.seed,
) -> dict[str, Any]:  # fmt: skip
    """Collect the run's metrics, sampled rollouts and configuration; see `show_rollouts`.

    Raises:
        RunError, ValueError: a file of the run is damaged, or there is no such checkpoint.
    """
    metrics, totals, ranks = StepLines(run.metrics_path), RunTotals(), RankTotals()
    config, notices = _config(run)
    values = read_config(run.config_path)
    problems = Problems(values)
    evaluations = list(StepLines(run.evaluations_summary_path))
    files = step_files(run)
    rows = map(problems.noted, map(ranks.noted, map(totals.noted, metrics)))
    training = make_series(rows, len(metrics), {REWARD: files.standard_errors()}, max_points)
    if evaluations:  # they start at step 0, and have standard errors
        training.columns.pop(VALIDATION, None)
    points = [{"step": row["step"], VALIDATION: row.get("reward")} for row in evaluations]
    errors = {row["step"]: row.get("reward_standard_error") for row in evaluations}
    validation = make_series(points, len(points), {VALIDATION: errors}, max_points)
    sampled = sample_rollouts(files, max_rollouts, seed)
    trusted = trust_remote_code, run_reward_code
    rollouts, checkpoint, more_notices = show_rollouts(run, sampled, log_ratio, *trusted)
    head = about(run, config)
    failure = [head.pop("state")] if head["state"].startswith("failed") else []
    return {
        "name": name,
        "about": head,
        "errors": [*failure, *problems.errors(), *not_validated(evaluations), *warnings_in(run.events_path)],
        "hints": [*problems.cut_off(), *_verdict(totals.latest)],
        "facts": run_facts(totals, evaluations, files),
        "samples": shown_samples(run, [row["step"] for row in evaluations]),
        "series": [asdict(training), asdict(validation)],
        "stages": stage_times(training.columns),
        "ranks": ranks.rows(),
        "rollouts": rollouts,
        "sample": {
            "num_rollouts": files.num_rollouts,
            "num_steps": len(files.steps),
            "num_sampled_steps": len({row["step"] for row in sampled}),
            "num_inspected_steps": len(files.inspected),
            "seed": seed,
        },
        "checkpoint": checkpoint,
        "notices": [*notices, *more_notices],
        "config": {key: _text(value) for key, value in leaves(values).items()},
        "changed": list(changed_keys(config)) if config is not None else [],
        "config_yaml": run.config_path.read_text(encoding="utf-8"),
    }


def _config(run: RunDirectory) -> tuple[Config | None, list[str]]:
    """Return the run's configuration, or None and a notice if this release cannot read it."""
    try:
        return load_config(run.config_path), []
    except ValueError as error:
        return None, [f"no settings: {error}"]


def _verdict(latest: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe what slows the run down, as `grpo-ray top` does."""
    rows = steady(list(latest))
    texts = bottleneck(rows), rank_hint(rank_figures(rows))
    return [text for text in texts if text] if rows else []


def _text(value: Any) -> str:
    """Write a value as YAML would."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
