"""The rates that a run measured."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.watch.metrics_catalog import PAUSED

FIRST_STEPS = 2  # engine and allocator are slower in these
NEEDED = (  # a step counts where all of them are above 0
    "throughput/sampled_tokens_per_s", "throughput/trained_tokens_per_s",
    "utilization/generators", "utilization/learner",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredRun:
    """Medians over the steps of a run."""

    config: Config
    num_steps: int
    step_s: float
    response_tokens: float
    """Mean length of a response."""
    sampled_tokens_per_s: float
    """Rate of one Generator while it samples."""
    trained_tokens_per_s: float
    """Rate of the Learner, with all its ranks, while it trains, in response tokens."""
    trained_frac: float
    """Share of the response tokens that get a gradient; those without an advantage get none."""
    sync_s: float
    """Seconds of a weight sync, in which Generators are paused."""


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
    rows = list(StepLines(run.metrics_path))
    steady = rows[FIRST_STEPS if len(rows) > 2 * FIRST_STEPS else 0 :]
    steady = [row for row in steady if all(row.get(name, 0) > 0 for name in NEEDED)]
    if not steady:
        raise ValueError(f"--from {path}: no step in which the Generators sampled and the Learner trained")
    response_tokens = median(row["rollout/response_tokens/mean"] for row in steady)
    all_tokens = config.algorithm.epochs_per_batch * config.rollouts_per_step * response_tokens
    # `throughput` is per second of a step, and `utilization` the share of the step that was work.
    sampled = [row["throughput/sampled_tokens_per_s"] / row["utilization/generators"] for row in steady]
    trained = [row["throughput/trained_tokens_per_s"] / row["utilization/learner"] for row in steady]
    return MeasuredRun(
        config=config,
        num_steps=len(steady),
        step_s=median(row["timing/step_s"] for row in steady),
        response_tokens=response_tokens,
        sampled_tokens_per_s=median(sampled) / config.generator.num_generators,
        trained_tokens_per_s=median(trained),
        trained_frac=min(1.0, median(row["throughput/trained_tokens"] for row in steady) / all_tokens),
        sync_s=median(row[PAUSED] for row in steady),
    )
