"""The plan as `grpo-ray plan` prints it."""

from collections.abc import Iterator

from grpo_ray.errors import counted
from grpo_ray.run.machine import gpus_of
from grpo_ray.tools.planning.gpu_memory import Budget, gib
from grpo_ray.tools.planning.memory_plan import MemoryPlan
from grpo_ray.tools.planning.model_shape import GB, find_shape
from grpo_ray.tools.planning.splits import Split, best_split, gpus_to_divide
from grpo_ray.tools.planning.step_time import (
    IMBALANCE,
    LINK_UTILIZATION,
    MEMORY_UTILIZATION,
    SAMPLING_UTILIZATION,
    TRAINING_UTILIZATION,
    MeasuredRun,
    StepTime,
    Workload,
    decoding,
    num_micro_batches,
    step_time,
)


def print_plan(plan: MemoryPlan) -> None:
    """Print the step, every device with its verdict, the time of a step if it is known, and the conclusion."""
    blocks = [_head(plan), *map(_device, plan.budgets)]
    if plan.time is not None:
        blocks += [_time(plan, plan.time), _splits(plan)]
    texts = ["\n".join(block) for block in (*blocks, _conclusion(plan))]
    print("\n\n".join(filter(None, texts)))


def _head(plan: MemoryPlan) -> Iterator[str]:
    config, algorithm, max_tokens = plan.config, plan.config.algorithm, plan.config.sampling.max_tokens
    model = config.model.path or "tiny"
    yield f"model     {model}, {plan.work.shape.num_parameters:,} parameters, served in {config.model.dtype}"
    yield (
        f"step      {algorithm.prompts_per_step} prompts x {algorithm.samples_per_prompt} samples = "
        f"{config.rollouts_per_step} rollouts, up to {config.rollouts_per_step * max_tokens:,} response tokens"
    )
    yield f"sequence  up to {plan.work.prompt_tokens:,} prompt + {max_tokens:,} response tokens"
    if config.episode_tasks:
        yield (
            "episodes are planned as responses that fill episodes.max_tokens with sampled tokens;\n"
            "not counted: branches, and the time of prompts between turns, of tools and of environments"
        )
    if config.distillation.teacher is not None:
        distillation = config.distillation
        yield (
            f"teacher   {distillation.teacher}, {distillation.num_teachers} x {distillation.num_gpus} GPUs of "
            "its own; their memory is not counted"
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
    item = max(budget.items, key=lambda item: item.num_bytes)
    largest = f"the largest item is {item.name} ({gib(item.num_bytes)})"
    if budget.capacity_bytes is None:
        yield f"  no verdict without a GPU; {largest}"
    elif budget.fits:
        yield f"  fits, {gib(budget.capacity_bytes - budget.needed_bytes)} to spare; {largest}"
    else:
        yield f"  DOES NOT FIT: {gib(max(budget.missing_bytes, 2**20))} too much; {largest}"


def _time(plan: MemoryPlan, time: StepTime) -> Iterator[str]:
    """Yield the parts of a step's time, where the rates are from, and warnings about them."""
    config, run = plan.config, plan.run
    rule = "the slower side" if time.overlaps else "one after the other"
    source = f"modelled from the data sheet of {plan.gpu_name}"
    if run is not None:
        source = f"at the rates of {run.num_steps} measured steps"
    yield f"time of a step with responses of {plan.work.response_tokens:,.4g} tokens, {source}"
    yield f"  sampling     {_s(time.sample_s):>8}  {_sampling_note(plan)}"
    yield f"  training     {_s(time.train_s):>8}  {_training_note(plan, time)}"
    if time.snapshot_s:
        yield f"  snapshot     {_s(time.snapshot_s):>8}  gathered and copied while the Learner waits"
    yield f"  weight sync  {_s(time.sync_s):>8}"
    yield f"  step         {_s(time.step_s):>8}  {rule} (weight_sync.max_lag {config.weight_sync.max_lag})"
    if run is None:
        yield from _assumptions(plan)
    else:
        yield from _warnings(plan, run)


def _sampling_note(plan: MemoryPlan) -> str:
    if plan.run is not None:
        return f"{plan.run.sampled_tokens_per_s:,.0f} tokens/s per Generator"
    running, step_s = decoding(plan.machine.gpu, plan.config, plan.work)
    return f"{running / step_s:,.0f} tokens/s per Generator, {running:,} sequences at a time"


def _training_note(plan: MemoryPlan, time: StepTime) -> str:
    learner = plan.config.learner
    of_ranks = ""
    if learner.num_ranks > 1:
        number = plan.config.num_updates * num_micro_batches(plan.config, plan.work)
        of_ranks = f"{number:,} micro-batches per rank, {_s(time.exposed_s)} of waiting for communication"
    if plan.run is None:
        return of_ranks or "one rank"
    rate = f"{plan.run.trained_tokens_per_s:,.0f} tokens/s, {plan.run.trained_frac:.0%} of the response tokens"
    ranks = plan.run.config.learner.num_ranks
    if ranks == learner.num_ranks:
        return rate
    return f"{rate} with {counted(ranks, 'rank')}; {of_ranks or 'one rank'}"


def _assumptions(plan: MemoryPlan) -> Iterator[str]:
    near, far = plan.machine.gpu.link / GB, plan.machine.network / GB
    of_peak = f"{TRAINING_UTILIZATION:.0%} of the peak in the Learner's passes, {SAMPLING_UTILIZATION:.0%}"
    yield f"  assumed: {of_peak} in an engine's, {MEMORY_UTILIZATION:.0%} of the"
    links = f"{LINK_UTILIZATION:.0%} of {near:,.0f} GB/s between the GPUs of a node and of {far:,.0f} GB/s"
    yield f"  memory's bandwidth, {links} between nodes,"
    yield f"  {IMBALANCE - 1:.0%} more for the slowest rank; nothing of it was measured here (docs/plan.md)"


def _warnings(plan: MemoryPlan, run: MeasuredRun) -> Iterator[str]:
    of_run = Workload(plan.work.shape, plan.work.prompt_tokens, run.response_tokens)
    own = step_time(run.config, of_run, plan.machine, run)
    yield f"  by this estimate a step of the measured run takes {_s(own.step_s)}; it took {_s(run.step_s)}"
    try:
        parameters = find_shape(run.config.model).num_parameters
    except ValueError as error:
        yield f"  ! the measured run's model cannot be compared with this one: {error}"
        parameters = plan.work.shape.num_parameters
    if parameters != plan.work.shape.num_parameters:
        yield f"  ! the rates come from another model ({parameters:,} parameters) and say little about this one"
    measured, planned = ((c.generator.num_gpus, c.learner.num_gpus) for c in (run.config, plan.config))
    if measured != planned:
        yield "  ! the rates come from other devices: generator.num_gpus or learner.num_gpus differ"
    ranks = plan.config.learner.num_ranks
    if not plan.config.learner.num_gpus and ranks != run.config.learner.num_ranks:
        yield "  ! communication between ranks on CPUs is not counted"


def _splits(plan: MemoryPlan) -> Iterator[str]:
    """Yield the table of splits, and the best one as overrides; nothing where GPUs are shared."""
    if not plan.splits:
        return
    best = best_split(plan.splits)
    yield f"{gpus_to_divide(plan.config, plan.num_gpus)} GPUs divided, on nodes of {plan.machine.gpus_per_node}"
    yield "     Generators  ranks  replicas    per rank  sampling  training      step  bottleneck"
    for split in plan.splits:
        learner, time = split.config.learner, split.time
        numbers = f"{split.config.generator.num_generators:>10}  {learner.num_ranks:>5}  {learner.replicas:>8}"
        seconds = f"{_s(time.generators_s):>8}  {_s(time.learner_s):>8}  {_s(time.step_s):>8}"
        mark = "*" if split is best else " "
        yield f"  {mark}  {numbers}  {gib(split.rank_bytes):>10}  {seconds}  {_bottleneck(split)}"
    if best is None:
        yield "no split fits"
    else:
        yield f"best: {best.overrides(plan.config)}"


def _bottleneck(split: Split) -> str:
    """Return the slower side and the share of the step in which the other has nothing to do."""
    time = split.time
    if not split.fits:
        return "does not fit"
    slower = "Learner" if time.learner_s > time.generators_s else "Generators"
    if not time.overlaps:
        return f"{slower}, {max(time.learner_s, time.generators_s) / time.step_s:.0%} of the step"
    faster, busy = ("Generators", time.generators_s) if slower == "Learner" else ("Learner", time.learner_s)
    return f"{slower}; {faster} idle {1 - busy / time.step_s:.0%}"


def _s(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _conclusion(plan: MemoryPlan) -> Iterator[str]:
    failed = [budget.device for budget in plan.budgets if not budget.fits]
    if not plan.has_enough_gpus:
        failed.append("the number of GPUs")
        yield (
            f"! the run needs {gpus_of(plan.config)} GPUs, but --gpus is {plan.num_gpus}; lower "
            "generator.num_generators, generator.num_gpus or learner.num_ranks, or share GPUs with "
            "generator.colocated=true weight_sync.max_lag=0"
        )
    if plan.remedy:
        yield f"! the Learner does not fit; {plan.remedy}"
    if failed:
        yield f"does not fit: {', '.join(failed)}"
    elif gpus_of(plan.config):
        yield "fits; contexts and vLLM's own memory are estimates; fragmentation is not counted: leave a GiB"
    else:
        yield "fits; the run uses no GPU"
