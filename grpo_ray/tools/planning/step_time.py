"""Seconds of a step from the rates, and how many GPUs to give to whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.rates import Rates


@dataclass(frozen=True)
class StepTime:
    """Both sides' work of a step. Validation, checkpoints, grading and stragglers come on top."""

    sample_s: float
    train_s: float
    sync_s: float
    overlaps: bool

    @property
    def step_s(self) -> float:
        """One after another when synchronous; from one version behind on, the slower side's alone."""
        if self.overlaps:
            return max(self.sample_s + self.sync_s, self.train_s)
        return self.sample_s + self.sync_s + self.train_s


@dataclass(frozen=True)
class Split:
    """GPUs for so many Generators, and one for the Learner, which is one process today."""

    num_generators: int
    num_gpus: int
    """In use; the rest are idle."""
    time: StepTime


def step_time(
    config: Config, rates: Rates, response_tokens: float, num_generators: int | None = None
) -> StepTime:
    """A step in which every response has `response_tokens`, the mean; replayed ones are not sampled again."""
    algorithm = config.algorithm
    num_generators = num_generators or config.generator.num_generators
    sampled = config.fresh_per_step * algorithm.samples_per_prompt * response_tokens
    trained = algorithm.epochs_per_batch * config.rollouts_per_step * response_tokens * rates.trained_frac
    return StepTime(
        sample_s=sampled / (rates.sampled_tokens_per_s * num_generators),
        train_s=trained / rates.trained_tokens_per_s,
        sync_s=rates.sync_s,
        overlaps=config.weight_sync.max_lag > 0,
    )


def splits(config: Config, rates: Rates, response_tokens: float, num_gpus: int) -> list[Split]:
    """Every number of Generators, each with `generator.num_gpus`, that leaves the Learner its GPU."""
    each = config.generator.num_gpus
    most = (num_gpus - config.learner.num_gpus) // each
    return [
        Split(
            number, number * each + config.learner.num_gpus, step_time(config, rates, response_tokens, number)
        )
        for number in range(1, most + 1)
    ]


def best(found: Sequence[Split]) -> Split:
    """The quickest step; of those within a hundredth of it the one with the fewest GPUs."""
    quickest = min(split.time.step_s for split in found)
    return next(split for split in found if split.time.step_s <= 1.01 * quickest)
