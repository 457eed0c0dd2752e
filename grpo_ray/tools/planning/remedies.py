"""What to change where something does not fit: keys of the configuration, tried one after another."""

from collections.abc import Callable, Iterator, Sequence

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, make_config
from grpo_ray.tools.planning.budget import Budget, gib

Overrides = tuple[str, ...]
Judge = Callable[[Config], Sequence[Budget]]


def remedy(config: Config, budget: Budget, longest: int, judge: Judge) -> str:
    """What would make the budget fit, or how far the best that was tried falls short.

    Args:
        longest: tokens of the longest sequence; a micro-batch holds one at least.
        judge: every budget of a changed configuration.
    """
    best = budget
    for overrides in _candidates(config, budget, longest):
        try:
            changed = make_config(config.model_dump(), overrides, "plan")
        except ConfigError:  # the rest of the configuration forbids it
            continue
        found = next(b for b in judge(changed) if b.owner == budget.owner)
        if found.fits:
            return f"would fit with {' '.join(overrides)}"
        best = min(best, found, key=lambda b: b.missing_bytes)
    return _out_of_reach(best)


def _out_of_reach(best: Budget) -> str:
    largest = max(best.items, key=lambda item: item.num_bytes)
    whose = f"{largest.name} alone take {gib(largest.num_bytes)}"
    if best.owner == "Learner":
        return (
            f"no key makes it fit: at least {gib(best.needed_bytes)} are needed on one GPU ({whose}), because "
            "the Learner is one process today and trains every weight; take a smaller model or a larger GPU"
        )
    return f"no key that was tried makes it fit: {gib(best.needed_bytes)} are needed ({whose})"


def _candidates(config: Config, budget: Budget, longest: int) -> Iterator[Overrides]:
    """From what costs least to what costs most."""
    if budget.owner == "Generator":
        yield from _for_generator(config)
        return
    yield from _for_learner(config, longest)
    if budget.owner == "host":
        smallest = tuple(_for_learner(config, longest))[-1:]
        for num_generators in range(config.generator.num_generators - 1, 0, -1):
            yield (f"generator.num_generators={num_generators}",)
        for overrides in smallest:
            yield (*overrides, "generator.num_generators=1", "generator.kv_cache_gib=0.25")


def _for_learner(config: Config, longest: int) -> Iterator[Overrides]:
    checkpointing: Overrides = ()
    if not config.learner.gradient_checkpointing:
        checkpointing = ("learner.gradient_checkpointing=true",)
        yield checkpointing
    sizes, size = [], config.learner.micro_batch_tokens // 2
    while size >= longest:
        sizes.append(f"learner.micro_batch_tokens={size}")
        size //= 2
    for some in sizes:
        yield (some,)
    for some in sizes if checkpointing else ():
        yield (*checkpointing, some)
    if config.algorithm.kl.reference != "none":
        smallest = sizes[-1:]
        yield (*checkpointing, *smallest, "algorithm.kl.reference=none", "algorithm.kl.coefficient=0")


def _for_generator(config: Config) -> Iterator[Overrides]:
    generator = config.generator
    if not generator.num_gpus:
        for size in (1, 2, 4, 8, 16, 32, 64):
            if size > generator.kv_cache_gib:
                yield (f"generator.kv_cache_gib={size}",)
        return
    if not generator.enforce_eager:
        yield ("generator.enforce_eager=true",)
    for share in (0.9, 0.95):
        if share > generator.gpu_memory_utilization:
            yield (f"generator.gpu_memory_utilization={share}",)
    yield ("generator.max_num_seqs=64", "generator.enforce_eager=true", "generator.gpu_memory_utilization=0.95")
    for num_gpus in (2, 4, 8):
        if num_gpus > generator.num_gpus:
            yield (f"generator.num_gpus={num_gpus}",)
