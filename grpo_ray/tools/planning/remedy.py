"""The change with which a Learner would fit its GPUs: more ranks, or smaller micro-batches."""

from collections.abc import Iterator

from grpo_ray.config import Config
from grpo_ray.tools.planning.gpu_memory import gib
from grpo_ray.tools.planning.learner_memory import learner_budget
from grpo_ray.tools.planning.model_shape import ModelShape
from grpo_ray.tools.planning.splits import divided

MOST_RANKS = 64


def remedy_of(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> str:
    """Return what makes the Learner fit: the fewest ranks that do, or else less work at a time.

    Without a sharded form (8-bit moments), and where ranks do not help, only the second is left.
    """
    smaller = "a lower learner.micro_batch_tokens or sampling.max_tokens, learner.gradient_checkpointing=full"
    if config.learner.moments == "8bit":
        return f"it may fit with {smaller}"
    for num_ranks in _more_ranks(config):
        of_ranks = divided(config, config.generator.num_generators, num_ranks, 1, min(num_ranks, 8))
        budget = learner_budget(shape, of_ranks, prompt_tokens, gpu_bytes)
        if budget.fits:
            pairs = f" generator.num_generators={num_ranks}" if config.generator.colocated else ""
            return f"it fits with learner.num_ranks={num_ranks}{pairs}: {gib(budget.needed_bytes)} per rank"
    return f"more ranks (learner.num_ranks) are not enough; use {smaller} or model.adapter"


def _more_ranks(config: Config) -> Iterator[int]:
    """Yield numbers of ranks beyond the configured one: all of one node, then whole nodes of 8."""
    yield from (n for n in [*range(2, 9), *range(16, MOST_RANKS + 1, 8)] if n > config.learner.num_ranks)
