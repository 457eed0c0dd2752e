"""The time of a step at measured rates, and the best split of GPUs between Generators and Learner."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.measured_run import MeasuredRun


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


@dataclass(frozen=True)
class Split:
    """A number of Generators next to the Learner, which is one process today."""

    num_generators: int
    num_gpus: int
    """GPUs in use; the rest are idle."""
    time: StepTime


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


def splits(config: Config, run: MeasuredRun, response_tokens: float, num_gpus: int) -> list[Split]:
    """Return every number of Generators that leaves the Learner its GPU; none where no GPUs are divided."""
    each, own = config.generator.num_gpus, config.learner.num_gpus
    if config.generator.colocated or not (each and own):
        return []
    return [
        Split(number, number * each + own, step_time(config, run, response_tokens, number))
        for number in range(1, (num_gpus - own) // each + 1)
    ]


def best(found: Sequence[Split]) -> Split:
    """Return the split with the fastest step; of those within 1% of it, the one with the fewest GPUs."""
    fastest = min(split.time.step_s for split in found)
    return next(split for split in found if split.time.step_s <= 1.01 * fastest)
