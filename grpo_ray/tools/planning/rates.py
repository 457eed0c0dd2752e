"""Tokens a second of a Generator that samples and of a Learner that trains: given, or measured by a run."""

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


@dataclass(frozen=True)
class Rates:
    """Of one Generator and of the Learner, each while it works."""

    sampled_tokens_per_s: float
    trained_tokens_per_s: float
    sync_s: float = 0.0
    """Seconds of a weight sync in which Generators stand still."""
    trained_frac: float = 1.0
    """Share of the response tokens that a gradient is computed for: groups without signal have none."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a run's own records say of it, medians over its steps."""

    config: Config
    rates: Rates
    response_tokens: float
    """Mean of a response."""
    step_s: float
    num_steps: int
    memory_bytes: Mapping[str, float]
    """The most that each process held at the end of a step, by its name."""


def measure(path: str | Path) -> MeasuredRun:
    """Read a run's config.yaml and metrics.jsonl.

    Raises:
        ValueError: it is no run, or has no step in which both sides worked.
        ConfigError: its config.yaml is of another version.
    """
    run = RunDirectory(path)
    if not run.config_path.exists():
        raise ValueError(f"--from {path}: no run there (it has no config.yaml)")
    config = load_config(run.config_path)
    rows = last_of_each_step(run.metrics_path)
    steady = [row for row in rows[FIRST_STEPS if len(rows) > 2 * FIRST_STEPS else 0 :] if _both_work(row)]
    if not steady:
        raise ValueError(f"--from {path}: no step in which the Generators sampled and the Learner trained")
    response_tokens = median(row["rollout/response_tokens/mean"] for row in steady)
    return MeasuredRun(
        config=config,
        rates=_rates(config, steady, response_tokens),
        response_tokens=response_tokens,
        step_s=median(row["timing/step_s"] for row in steady),
        num_steps=len(steady),
        memory_bytes=_memory(rows),
    )


def _both_work(row: Mapping[str, Any]) -> bool:
    return all(
        row.get(f"{kind}/{name}", 0) > 0
        for kind, name in (
            ("throughput", "sampled_tokens_per_s"),
            ("throughput", "trained_tokens_per_s"),
            ("utilization", "generators"),
            ("utilization", "learner"),
        )
    )


def _rates(config: Config, rows: Sequence[Mapping[str, Any]], response_tokens: float) -> Rates:
    """Tokens over seconds of work: the metrics' are over the step's, and `utilization` is the share of it."""
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


def _memory(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    most: dict[str, float] = {}
    for row in rows:
        for metric, value in row.items():
            area, _, name = metric.partition("/")
            if area == "memory" and name != "object_store_spilled_bytes":
                process = name.removesuffix("_bytes")
                most[process] = max(most.get(process, 0.0), value)
    return most
