"""Rates that a run measured: tokens per second of a Generator that samples and of a Learner that trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.telemetry.metrics_catalog import SYNC
from grpo_ray.telemetry.run_files import RunDirectory, last_of_each_step

FIRST_STEPS = 2  # engine and allocator are slower in these
NEEDED = (  # a step counts where all of them are above 0
    "throughput/sampled_tokens_per_s", "throughput/trained_tokens_per_s",
    "utilization/generators", "utilization/learner",
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Tokens per second of one Generator and of the Learner, each while it works."""

    sampled_tokens_per_s: float
    trained_tokens_per_s: float
    sync_s: float
    """Seconds of a weight sync, in which Generators are paused."""
    trained_frac: float
    """Share of the response tokens that get a gradient; groups without signal get none."""


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the steps of a run."""

    config: Config
    rates: Rates
    response_tokens: float
    """Mean length of a response."""
    step_s: float
    num_steps: int


def measure(path: str | Path) -> MeasuredRun:
    """Read a run's config.yaml and metrics.jsonl.

    Raises:
        ValueError: there is no run, or it has no step in which both sides worked.
        ConfigError: its config.yaml is of another version.
    """
    run = RunDirectory(path)
    if not run.config_path.exists():
        raise ValueError(f"--from {path}: no run there (it has no config.yaml)")
    config = load_config(run.config_path)
    rows = last_of_each_step(run.metrics_path)
    steady = rows[FIRST_STEPS if len(rows) > 2 * FIRST_STEPS else 0 :]
    steady = [row for row in steady if all(row.get(name, 0) > 0 for name in NEEDED)]
    if not steady:
        raise ValueError(f"--from {path}: no step in which the Generators sampled and the Learner trained")
    response_tokens = median(row["rollout/response_tokens/mean"] for row in steady)
    return MeasuredRun(
        config=config,
        rates=_rates(config, steady, response_tokens),
        response_tokens=response_tokens,
        step_s=median(row["timing/step_s"] for row in steady),
        num_steps=len(steady),
    )


def _rates(config: Config, rows: Sequence[Mapping[str, Any]], response_tokens: float) -> Rates:
    """Divide tokens by seconds of work: `throughput` is per second of a step, `utilization` the share of it."""
    num_generators = config.generator.num_generators
    all_tokens = config.algorithm.epochs_per_batch * config.rollouts_per_step * response_tokens
    return Rates(
        sampled_tokens_per_s=median(
            row["throughput/sampled_tokens_per_s"] / (row["utilization/generators"] * num_generators)
            for row in rows
        ),
        trained_tokens_per_s=median(
            row["throughput/trained_tokens_per_s"] / row["utilization/learner"] for row in rows
        ),
        sync_s=median(sum(row[name] for name in SYNC) for row in rows),
        trained_frac=min(1.0, median(row["throughput/trained_tokens"] for row in rows) / all_tokens),
    )
