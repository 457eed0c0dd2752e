"""The plan as it is printed."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from grpo_ray.tools.experiments.resources import gpus_of
from grpo_ray.tools.planning.budget import Budget, gib
from grpo_ray.tools.planning.host_memory import host_budget
from grpo_ray.tools.planning.make_plan import ASSUMED_PROMPT_TOKENS, Plan
from grpo_ray.tools.planning.model_shape import ModelShape
from grpo_ray.tools.planning.rates import MeasuredRun
from grpo_ray.tools.planning.step_time import Split, StepTime, best, splits, step_time

PROCESSES = {  # by their names in `memory/<name>_bytes`
    "driver": "driver",
    "learner": "Learner",
    "generator": "Generator",
    "scorer": "Scorer",
    "buffer": "TrajectoryBuffer",
    "weight_sync": "WeightSync",
}


def show(plan: Plan) -> None:
    """Print it: the step, every device, the time, and the verdict."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(_head(plan))
    for budget in plan.budgets:
        console.print()
        console.print(_device(budget))
        for line in _verdict(plan, budget):
            console.print(line)
    for block in (_memory_of_run(plan), _time(plan)):
        if block:
            console.print()
        for part in block:
            console.print(part)
    console.print()
    console.print("\n".join(_conclusion(plan)))


def _head(plan: Plan) -> Table:
    config, shape = plan.config, plan.shape
    tokens = config.rollouts_per_step * config.sampling.max_tokens
    assumed = f" (assumed {ASSUMED_PROMPT_TOKENS}; give --prompt-tokens)" if plan.is_prompt_assumed else ""
    return _grid(
        [
            ("model", f"{shape.name}, {shape.num_parameters:,} parameters, served in {config.model.dtype}"),
            (
                "a step",
                f"{config.algorithm.prompts_per_step} prompts x {config.algorithm.samples_per_prompt} samples "
                f"= {config.rollouts_per_step} rollouts, up to {tokens:,} response tokens",
            ),
            (
                "a sequence",
                f"up to {plan.prompt_tokens:,}{assumed} + {config.sampling.max_tokens:,} tokens",
            ),
        ]
    )


def _device(budget: Budget) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title=budget.device, title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    table.show_header = False
    for item in budget.items:
        name = f"{item.process}: {item.name}" if item.process else item.name
        table.add_row(f"  {name}", gib(item.num_bytes), item.note)
    of = f"of {gib(budget.capacity_bytes)}" if budget.capacity_bytes is not None else ""
    table.add_row("  in all", gib(budget.needed_bytes), of)
    return table


def _verdict(plan: Plan, budget: Budget) -> Iterator[str]:
    if budget.capacity_bytes is None:
        yield "  not judged: give --host-memory"
    elif budget.fits:
        yield f"  fits, {gib(budget.capacity_bytes - budget.needed_bytes)} to spare"
    else:
        yield f"  DOES NOT FIT: {gib(budget.missing_bytes)} too much; {plan.remedy(budget)}"
    for remark in budget.remarks:
        yield f"  {remark}"


# ---- time ----


def _time(plan: Plan) -> list[Table | str]:
    if plan.rates is None:
        return [
            "time of a step: not known; give --sampled-tokens-per-s (of one Generator) and "
            "--trained-tokens-per-s (of the Learner), or --from RUN"
        ]
    rates, tokens, config = plan.rates, plan.response_tokens, plan.config
    time = step_time(config, rates, tokens)
    rule = "the slower of the two" if time.overlaps else "one after the other"
    rows = [
        ("sampling", f"{_s(time.sample_s)} at {rates.sampled_tokens_per_s:,.0f} tokens/s a Generator"),
        (
            "training",
            f"{_s(time.train_s)} at {rates.trained_tokens_per_s:,.0f} tokens/s, "
            f"of {rates.trained_frac:.0%} of the response tokens",
        ),
        ("weight sync", _s(time.sync_s) if plan.run else "not counted"),
        ("a step", f"{_s(time.step_s)}, {rule} (weight_sync.max_lag {config.weight_sync.max_lag})"),
        (
            "the run",
            f"{_long(time.step_s * config.algorithm.num_steps)} for {config.algorithm.num_steps} steps",
        ),
    ]
    title = (
        f"time of a step, responses of {tokens:,.4g} tokens (validation, checkpoints and stragglers left out)"
    )
    return [title, _grid(rows), *_of_run(plan), *_split_lines(plan)]


def _of_run(plan: Plan) -> list[str]:
    """The same formula against what the run took, and what makes its rates another's."""
    if plan.run is None:
        return []
    run, its_shape = plan.run, plan.run_shape
    own = step_time(run.config, run.rates, run.response_tokens)
    lines = [
        f"  rates: medians of {run.num_steps} steps; by them a step of that run takes {_s(own.step_s)}, "
        f"and it took {_s(run.step_s)}"
    ]
    if its_shape is not None and its_shape.num_parameters != plan.shape.num_parameters:
        lines.append(
            f"  ! they are of another model ({its_shape.num_parameters:,} parameters), and say little of this"
        )
    devices = [(c.generator.num_gpus, c.learner.num_gpus) for c in (run.config, plan.config)]
    if devices[0] != devices[1]:
        lines.append("  ! they are of other devices: generator.num_gpus or learner.num_gpus differ")
    return lines


def _split_lines(plan: Plan) -> list[Table | str]:
    """How the GPUs are best divided; nothing where there is nothing to divide."""
    config = plan.config
    if (
        plan.rates is None
        or config.generator.colocated
        or not (config.generator.num_gpus and config.learner.num_gpus)
    ):
        return []
    found = splits(config, plan.rates, plan.response_tokens, plan.hardware.num_gpus)
    if not found:
        return []
    chosen = best(found)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "Generators", "Learner", "sampling", "training", "a step", "waits"):
        table.add_column(name, justify="left" if name == "waits" else "right", no_wrap=True)
    for split in found:
        table.add_row(*_split_row(split, split is chosen, config.learner.num_gpus))
    idle = plan.hardware.num_gpus - chosen.num_gpus
    advice = f"best: generator.num_generators={chosen.num_generators}"
    if idle:
        advice += f"; {idle} more GPUs bring nothing, as the Learner is one process on one GPU today"
    return ["", f"{plan.hardware.num_gpus} GPUs divided", table, advice]


def _split_row(split: Split, is_best: bool, learner_gpus: int) -> Sequence[str]:
    time = split.time
    of_generators = split.num_gpus - learner_gpus
    seconds = (_s(time.sample_s), _s(time.train_s), _s(time.step_s))
    return ("*" if is_best else "", str(of_generators), str(learner_gpus), *seconds, _who_waits(time))


def _who_waits(time: StepTime) -> str:
    sampling = time.sample_s + time.sync_s
    if not time.overlaps:
        return "each its turn"
    who, idle = ("Learner", 1 - time.train_s / time.step_s)
    if time.train_s > sampling:
        who, idle = "Generators", 1 - sampling / time.step_s
    return f"{who}, {idle:.0%}"


# ---- memory that a run measured ----


def _memory_of_run(plan: Plan) -> list[Table | str]:
    """Of a run on a CPU: what its processes held, and what the plan expects of its configuration."""
    run, shape = plan.run, plan.run_shape
    if run is None or shape is None or gpus_of(run.config):
        return []
    pairs = compare_memory(shape, run, plan.prompt_tokens)
    here, there = sum(expected for _, expected, _ in pairs), sum(measured for *_, measured in pairs)
    rows = [(name, f"{gib(there)}; a plan of it expects {gib(here)}") for name, here, there in pairs]
    rows.append(("in all", f"{gib(there)}; a plan of it expects {gib(here)} ({here / there - 1:+.0%})"))
    return ["memory of that run's processes, the most at the end of a step", _grid(rows)]


def compare_memory(shape: ModelShape, run: MeasuredRun, prompt_tokens: int) -> list[tuple[str, float, float]]:
    """(process, expected, measured bytes) of every process that the run's metrics have; Generators together."""
    measured: dict[str, float] = {}
    for metric, value in run.memory_bytes.items():
        process = PROCESSES[metric.partition("-")[0]]
        measured[process] = measured.get(process, 0.0) + value
    host = host_budget(shape, run.config, prompt_tokens, None)
    return [(process, _expected(host, process), value) for process, value in measured.items()]


def _expected(host: Budget, process: str) -> float:
    return sum(item.num_bytes for item in host.items if item.process == process)


# ---- the end ----


def _conclusion(plan: Plan) -> list[str]:
    lines = [f"! {plan.too_few_gpus}"] if plan.too_few_gpus else []
    if plan.fits:
        judged = [budget for budget in plan.budgets if budget.capacity_bytes is not None]
        return [f"fits: {', '.join(budget.device for budget in judged)}"]
    failed = [budget.device for budget in plan.budgets if not budget.fits]
    reasons = [*failed, *(["the number of GPUs"] if plan.too_few_gpus else [])]
    return [*lines, f"does not fit: {', '.join(reasons)}"]


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(f"  {name}", value)
    return table


def _s(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _long(seconds: float) -> str:
    if seconds < 120:
        return _s(seconds)
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
