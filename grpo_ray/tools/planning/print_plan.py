"""The plan as `grpo-ray plan` prints it."""

from collections.abc import Iterator

from grpo_ray.tools.experiments.resources import gpus_of
from grpo_ray.tools.planning.gpu_memory import Budget, gib
from grpo_ray.tools.planning.memory_plan import MemoryPlan
from grpo_ray.tools.planning.print_time import split_lines, time_lines


def print_plan(plan: MemoryPlan) -> None:
    """Print the step, every device with its verdict, the time of a step if it is known, and the conclusion."""
    blocks = [_head(plan), *map(_device, plan.budgets)]
    if plan.time is not None:
        blocks += [time_lines(plan, plan.time), split_lines(plan)]
    texts = ["\n".join(block) for block in (*blocks, _conclusion(plan))]
    print("\n\n".join(filter(None, texts)))


def _head(plan: MemoryPlan) -> Iterator[str]:
    config, algorithm, max_tokens = plan.config, plan.config.algorithm, plan.config.sampling.max_tokens
    model = config.model.path or "tiny"
    yield f"model     {model}, {plan.shape.num_parameters:,} parameters, served in {config.model.dtype}"
    yield (
        f"step      {algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} samples = "
        f"{config.rollouts_per_step} rollouts, up to {config.rollouts_per_step * max_tokens:,} response tokens"
    )
    yield f"sequence  up to {plan.prompt_tokens:,} prompt + {max_tokens:,} response tokens"
    if config.episode_tasks:
        yield (
            "episodes are planned as responses that fill episodes.max_tokens with sampled tokens;\n"
            "not counted: branches, and the time of prompts between turns, of tools and of environments"
        )
    if config.distillation.teacher is not None:
        distillation = config.distillation
        yield (
            f"teacher   {distillation.teacher}, {distillation.num_teachers} x {distillation.num_gpus} GPUs of "
            "its own, whose memory is not counted"
        )
    if config.generator.engine_args:
        yield f"not counted: generator.engine_args ({', '.join(config.generator.engine_args)})"


def _device(budget: Budget) -> Iterator[str]:
    yield budget.device
    for item in budget.items:
        yield f"  {item.name:<24}  {gib(item.num_bytes):>9}  {item.note}".rstrip()
    capacity = "" if budget.capacity_bytes is None else f"of {gib(budget.capacity_bytes)}"
    yield f"  {'total':<24}  {gib(budget.needed_bytes):>9}  {capacity}".rstrip()
    if budget.remark:
        yield f"  {budget.remark}"
    largest = f"the largest item is {budget.largest.name} ({gib(budget.largest.num_bytes)})"
    if budget.capacity_bytes is None:
        yield f"  no verdict without a GPU; {largest}"
    elif budget.fits:
        yield f"  fits, {gib(budget.capacity_bytes - budget.needed_bytes)} to spare; {largest}"
    else:
        yield f"  DOES NOT FIT: {gib(budget.missing_bytes)} too much; {largest}"


def _conclusion(plan: MemoryPlan) -> Iterator[str]:
    failed = [budget.device for budget in plan.budgets if not budget.fits]
    if not plan.has_enough_gpus:
        failed.append("the number of GPUs")
        yield (
            f"! the run needs {gpus_of(plan.config)} GPUs, and --gpus is {plan.num_gpus}; lower "
            "generator.num_generators, generator.num_gpus or learner.num_ranks, or share GPUs with "
            "generator.colocated=true weight_sync.max_lag=0"
        )
    if plan.remedy:
        yield f"! the Learner does not fit; {plan.remedy}"
    if failed:
        yield f"does not fit: {', '.join(failed)}"
    elif gpus_of(plan.config):
        yield "fits; not counted are CUDA contexts, vLLM's workspace and fragmentation: leave some GiB for them"
    else:
        yield "fits; the run uses no GPU"
