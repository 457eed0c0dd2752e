"""The plan as `grpo-ray plan` prints it."""

from collections.abc import Iterator

from grpo_ray.tools.experiments.resources import gpus_of
from grpo_ray.tools.planning.gpu_memory import Budget, gib
from grpo_ray.tools.planning.memory_plan import MemoryPlan
from grpo_ray.tools.planning.model_shape import find_shape
from grpo_ray.tools.planning.step_time import MeasuredRun, best_split, splits, step_time


def print_plan(plan: MemoryPlan) -> None:
    """Print the step, every device with its verdict, the time of a step if it is known, and the conclusion."""
    blocks = [_head(plan), *map(_device, plan.budgets)]
    if plan.run is not None:
        blocks += [_time(plan, plan.run), _splits(plan, plan.run)]
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


def _time(plan: MemoryPlan, run: MeasuredRun) -> Iterator[str]:
    config = plan.config
    time = step_time(config, run, plan.response_tokens, config.generator.num_generators)
    rule = "the slower side" if time.overlaps else "one after the other"
    yield (
        f"time of a step with responses of {plan.response_tokens:,.4g} tokens, at the rates of {run.num_steps} "
        "measured steps"
    )
    yield f"  sampling     {_s(time.sample_s):>8}  {run.sampled_tokens_per_s:,.0f} tokens/s per Generator"
    trained = f"{run.trained_tokens_per_s:,.0f} tokens/s, {run.trained_frac:.0%} of the response tokens"
    yield f"  training     {_s(time.train_s):>8}  {trained}"
    yield f"  weight sync  {_s(time.sync_s):>8}"
    yield f"  step         {_s(time.step_s):>8}  {rule} (weight_sync.max_lag {config.weight_sync.max_lag})"
    own = step_time(run.config, run, run.response_tokens, run.config.generator.num_generators)
    yield f"  by this estimate a step of the measured run takes {_s(own.step_s)}; it took {_s(run.step_s)}"
    parameters = find_shape(run.config.model).num_parameters
    if parameters != plan.shape.num_parameters:
        yield f"  ! the rates are of another model ({parameters:,} parameters), and say little about this one"
    measured, planned = ((c.generator.num_gpus, c.learner.num_gpus) for c in (run.config, config))
    if measured != planned:
        yield "  ! the rates are of other devices: generator.num_gpus or learner.num_gpus differ"


def _splits(plan: MemoryPlan, run: MeasuredRun) -> Iterator[str]:
    config = plan.config
    times = splits(config, run, plan.response_tokens, plan.num_gpus)
    if not times:
        return
    best = best_split(times)
    yield f"{plan.num_gpus} GPUs divided"
    yield "     Generators  sampling  training      step  idle"
    for number, time in times.items():
        sampling = time.sample_s + time.sync_s
        side, busy = ("Generators", sampling) if time.train_s > sampling else ("Learner", time.train_s)
        idle = f"{side}, {1 - busy / time.step_s:.0%}" if time.overlaps else "each in turn"
        seconds = f"{_s(time.sample_s):>8}  {_s(time.train_s):>8}  {_s(time.step_s):>8}"
        yield f"  {'*' if number == best else ' '}  {number:>10}  {seconds}  {idle}"
    unused = plan.num_gpus - best * config.generator.num_gpus - config.learner.num_gpus
    gain = f"; {unused} more GPUs bring nothing, as the Learner is one process on one GPU today"
    yield f"best: generator.num_generators={best}{gain if unused else ''}"


def _conclusion(plan: MemoryPlan) -> Iterator[str]:
    failed = [budget.device for budget in plan.budgets if not budget.fits]
    if not plan.has_enough_gpus:
        failed.append("the number of GPUs")
        yield (
            f"! the run needs {gpus_of(plan.config)} GPUs, and --gpus is {plan.num_gpus}; lower "
            "generator.num_generators or generator.num_gpus, or share one GPU with generator.colocated=true "
            "weight_sync.max_lag=0"
        )
    if failed:
        yield f"does not fit: {', '.join(failed)}"
    elif gpus_of(plan.config):
        yield "fits; not counted are CUDA contexts, vLLM's workspace and fragmentation: leave some GiB for them"
    else:
        yield "fits; the run uses no GPU"


def _s(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
