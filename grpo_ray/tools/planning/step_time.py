"""The time of a step at measured rates, and the best split of GPUs between Generators and Learner."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
    """Rate of the Learner while it trains, in response tokens."""
    trained_frac: float
    """Share of the response tokens that get a gradient; groups without signal get none."""
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
    rows = last_of_each_step(run.metrics_path)
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
        sync_s=median(sum(row[name] for name in SYNC) for row in steady),
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds of work per step; validation, checkpoints, grading and stragglers are not counted."""

    sample_s: float
    train_s: float
    sync_s: float
    overlaps: bool

    @property
    def step_s(self) -> float:
        """The sum in a synchronous run; with `max_lag` above 0, the slower side alone."""
        if self.overlaps:
            return max(self.sample_s + self.sync_s, self.train_s)
        return self.sample_s + self.sync_s + self.train_s


def step_time(config: Config, run: MeasuredRun, response_tokens: float, num_generators: int) -> StepTime:
    """Return the time of a step with a mean response of `response_tokens`; replayed groups cost no sampling."""
    algorithm = config.algorithm
    sampled = config.fresh_per_step * algorithm.samples_per_prompt * response_tokens
    trained = algorithm.epochs_per_batch * config.rollouts_per_step * response_tokens * run.trained_frac
    return StepTime(
        sample_s=sampled / (run.sampled_tokens_per_s * num_generators),
        train_s=trained / run.trained_tokens_per_s,
        sync_s=run.sync_s,
        overlaps=config.weight_sync.max_lag > 0,
    )


def splits(config: Config, run: MeasuredRun, response_tokens: float, num_gpus: int) -> dict[int, StepTime]:
    """Return a step's time per number of Generators that leaves the Learner its GPU; none if they share it."""
    each, own = config.generator.num_gpus, config.learner.num_gpus
    if config.generator.colocated or not (each and own):
        return {}
    most = (num_gpus - own) // each
    return {number: step_time(config, run, response_tokens, number) for number in range(1, most + 1)}


def best_split(times: Mapping[int, StepTime]) -> int:
    """Return the number of Generators with the fastest step; of those within 1% of it, the smallest."""
    fastest = min(time.step_s for time in times.values())
    return min(number for number, time in times.items() if time.step_s <= 1.01 * fastest)
