"""The divisions of the GPUs between Generators and the Learner's ranks, and what makes a Learner fit."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from grpo_ray.config import Config
from grpo_ray.tools.planning.gpu_memory import GIB, generator_budget, gib
from grpo_ray.tools.planning.learner_memory import learner_budget
from grpo_ray.tools.planning.model_shape import Machine, ModelShape
from grpo_ray.tools.planning.step_time import MeasuredRun, StepTime, Workload, step_time

MOST_RANKS = 64


@dataclass(frozen=True)
class Split:
    """One division of the GPUs."""

    config: Config
    time: StepTime
    rank_bytes: float  # memory of a rank's GPU
    fits: bool

    def overrides(self, given: Config) -> str:
        """Return the overrides with which the given configuration makes this split."""
        return f"generator.num_generators={self.config.generator.num_generators} {ranks_of(self.config, given)}"


def ranks_of(config: Config, given: Config) -> str:
    """Return the overrides with which the given configuration has the other one's ranks."""
    learner = config.learner
    text = f"learner.num_ranks={learner.num_ranks}"
    if max(learner.replicas, given.learner.replicas) > 1:
        text += f" learner.replicas={learner.replicas}"
    default = learner.model_copy(update={"ranks_per_node": given.learner.ranks_per_node})
    if learner.num_ranks_per_node != default.num_ranks_per_node:
        text += f" learner.ranks_per_node={learner.num_ranks_per_node}"
    return text


def splits(
    config: Config, work: Workload, machine: Machine, num_gpus: int, run: MeasuredRun | None
) -> list[Split]:
    """Return the divisions of `num_gpus`, by number of ranks; none if Generators and ranks share GPUs.

    The ranks are on one node, or as many on each node. In the second case one copy of the weights per node
    (`learner.replicas`) is taken where it makes the faster step of those that fit.
    """
    if config.generator.colocated or not (config.generator.num_gpus and config.learner.num_gpus):
        return []
    found = []
    num_divided, is_one_rank = gpus_to_divide(config, num_gpus), config.learner.moments == "8bit" or config.sft
    all_divisions = divisions(num_divided, machine.gpus_per_node, config.generator.num_gpus)
    for number, num_nodes, num_generators in islice(all_divisions, 1 if is_one_rank else None):
        candidates = [
            _split(divided(config, num_generators, number, replicas, number // num_nodes), work, machine, run)
            for replicas in sorted({1, num_nodes})
        ]
        found.append(best_split(candidates) or candidates[0])
    return found


def gpus_to_divide(config: Config, num_gpus: int) -> int:
    """Return how many GPUs are left for Generators and ranks: Teachers have their own."""
    teachers = config.distillation
    return num_gpus - (teachers.num_teachers * teachers.num_gpus if teachers.teacher is not None else 0)


def divisions(num_gpus: int, gpus_per_node: int, of_generator: int) -> Iterator[tuple[int, int, int]]:
    """Yield (ranks, nodes that they are on, Generators that the other GPUs have room for)."""
    nodes = [min(gpus_per_node, num_gpus - start) for start in range(0, num_gpus, gpus_per_node)]
    for number in range(1, num_gpus):
        if number <= nodes[0]:
            left = [nodes[0] - number, *nodes[1:]]
        elif number % len(nodes) == 0 and number // len(nodes) <= nodes[-1]:
            left = [size - number // len(nodes) for size in nodes]
        else:
            continue
        if num_generators := sum(size // of_generator for size in left):
            yield number, 1 if number <= nodes[0] else len(nodes), num_generators


def divided(config: Config, num_generators: int, num_ranks: int, replicas: int, per_node: int) -> Config:
    ranks = {"num_ranks": num_ranks, "replicas": replicas, "ranks_per_node": per_node}
    return config.changed(generator={"num_generators": num_generators}, learner=ranks)


def best_split(found: Sequence[Split]) -> Split | None:
    """Return the fitting split with the fastest step; of those within 1% of it, the first."""
    fitting = [split for split in found if split.fits]
    fastest = min((split.time.step_s for split in fitting), default=0.0)
    return next((split for split in fitting if split.time.step_s <= 1.01 * fastest), None)


def _split(config: Config, work: Workload, machine: Machine, run: MeasuredRun | None) -> Split:
    gpu_bytes = machine.gpu.memory_gib * GIB
    of_rank = learner_budget(work.shape, config, work.prompt_tokens, gpu_bytes)
    of_generator = generator_budget(work.shape, config, work.prompt_tokens, gpu_bytes)
    time = step_time(config, work, machine, run)
    return Split(config, time, of_rank.needed_bytes, of_rank.fits and of_generator.fits)


def remedy_of(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> str:
    """Return what makes the Learner fit: the fewest ranks that do, or else less work at a time.

    With 8-bit moments or supervised steps, which ranks cannot share, and where ranks do not help, only the
    second is left.
    """
    smaller = "a lower learner.micro_batch_tokens or sampling.max_tokens, learner.gradient_checkpointing=full"
    if config.learner.moments == "8bit" or config.sft:
        return f"it may fit with {smaller}"
    all_of_a_node, whole_nodes = range(2, 9), range(16, MOST_RANKS + 1, 8)
    for num_ranks in (n for n in (*all_of_a_node, *whole_nodes) if n > config.learner.num_ranks):
        of_ranks = divided(config, config.generator.num_generators, num_ranks, 1, min(num_ranks, 8))
        budget = learner_budget(shape, of_ranks, prompt_tokens, gpu_bytes)
        if budget.fits:
            pairs = f" generator.num_generators={num_ranks}" if config.generator.colocated else ""
            return f"it fits with {ranks_of(of_ranks, config)}{pairs}: {gib(budget.needed_bytes)} per rank"
    return f"more ranks (learner.num_ranks) are not enough; use {smaller} or model.adapter"
