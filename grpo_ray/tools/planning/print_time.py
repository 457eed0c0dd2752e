"""The time of a step and the table of splits, as `grpo-ray plan` prints them."""

from collections.abc import Iterator

from grpo_ray.tools.planning.gpu_memory import gib
from grpo_ray.tools.planning.hardware import (
    GB,
    IMBALANCE,
    LINK_UTILIZATION,
    MEMORY_UTILIZATION,
    SAMPLING_UTILIZATION,
    TRAINING_UTILIZATION,
)
from grpo_ray.tools.planning.measured_run import MeasuredRun
from grpo_ray.tools.planning.memory_plan import MemoryPlan
from grpo_ray.tools.planning.model_shape import find_shape
from grpo_ray.tools.planning.modelled_work import Workload, decoding, num_micro_batches
from grpo_ray.tools.planning.splits import Split, best_split
from grpo_ray.tools.planning.step_time import StepTime, step_time


def time_lines(plan: MemoryPlan, time: StepTime) -> Iterator[str]:
    """Yield the parts of a step's time, where the rates are from, and warnings about them."""
    config, run = plan.config, plan.run
    rule = "the slower side" if time.overlaps else "one after the other"
    source = (
        f"modelled from the data sheet of {plan.gpu_name}"
        if run is None
        else f"at the rates of {run.num_steps} measured steps"
    )
    yield f"time of a step with responses of {plan.response_tokens:,.4g} tokens, {source}"
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
    return f"{rate} with {ranks} rank{'s' if ranks > 1 else ''}; {of_ranks or 'one rank'}"


def _assumptions(plan: MemoryPlan) -> Iterator[str]:
    near, far = plan.machine.gpu.link / GB, plan.machine.network / GB
    of_peak = f"{TRAINING_UTILIZATION:.0%} of the peak in the Learner's passes, {SAMPLING_UTILIZATION:.0%}"
    yield f"  assumed: {of_peak} in an engine's, {MEMORY_UTILIZATION:.0%} of the"
    links = f"{LINK_UTILIZATION:.0%} of {near:,.0f} GB/s between the GPUs of a node and of {far:,.0f} GB/s"
    yield f"  memory's bandwidth, {links} between nodes,"
    yield f"  {IMBALANCE - 1:.0%} more for the slowest rank; nothing of it was measured here (docs/plan.md)"


def _warnings(plan: MemoryPlan, run: MeasuredRun) -> Iterator[str]:
    of_run = Workload(plan.shape, plan.prompt_tokens, run.response_tokens)
    own = step_time(run.config, of_run, plan.machine, run)
    yield f"  by this estimate a step of the measured run takes {_s(own.step_s)}; it took {_s(run.step_s)}"
    parameters = find_shape(run.config.model).num_parameters
    if parameters != plan.shape.num_parameters:
        yield f"  ! the rates are of another model ({parameters:,} parameters), and say little about this one"
    measured, planned = ((c.generator.num_gpus, c.learner.num_gpus) for c in (run.config, plan.config))
    if measured != planned:
        yield "  ! the rates are of other devices: generator.num_gpus or learner.num_gpus differ"
    ranks = plan.config.learner.num_ranks
    if not plan.config.learner.num_gpus and ranks != run.config.learner.num_ranks:
        yield "  ! communication between ranks on CPUs is not counted"


def split_lines(plan: MemoryPlan) -> Iterator[str]:
    """Yield the table of splits, and the best one as overrides; nothing where GPUs are shared."""
    if not plan.splits:
        return
    best = best_split(plan.splits)
    yield f"{plan.num_gpus} GPUs divided, on nodes of {plan.machine.gpus_per_node}"
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
        yield f"best: {best.overrides}"


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
