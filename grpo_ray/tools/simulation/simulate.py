"""A whole run in virtual time: the run's own controller, producer, buffer, weight sync and recovery.

Only the engines, the Learner (all its ranks as one), Scorers, Teachers and EnvironmentWorkers are simulated
(engine.py, workers.py, environments.py). No model, text or transport of weights is there, so checkpoints hold
no weights, and rewards mean nothing.
"""

import asyncio
import random
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.task import parts_of
from grpo_ray.core.context import Prepared
from grpo_ray.core.controller import Controller
from grpo_ray.core.groups import GroupBook
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.json_lines import StepLines
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.restores import train_through_restores
from grpo_ray.tasks import make_order
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import PromptStream
from grpo_ray.tasks.prompts import Prompter, TextTemplate, make_items
from grpo_ray.tools.simulation.actors import SimulatedActors, Trace
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.tools.simulation.workers import Account, Faults
from grpo_ray.tools.top.bottleneck import bottleneck, stage_seconds
from grpo_ray.types import StartingModel
from grpo_ray.watch.activity import ALL, GENERATOR
from grpo_ray.watch.clock import VirtualClock, simulated_by
from grpo_ray.watch.memory import ProcessFamily
from grpo_ray.watch.run_log import Metrics

MAX_EXAMPLES = 4096  # per part; more only take memory
END_TOKEN = 0
FIRST_STEPS = 2  # they fill the pipeline
MAX_LAGS = 12  # lines of the lag's distribution


class Watch:
    """The display of a simulated run, which shows nothing and notes the process's memory."""

    def __init__(self) -> None:
        self.memory_bytes: dict[int, int] = {}  # resident, of the whole process, by step
        self._family = ProcessFamily()

    def status(self, text: str) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...
    def warning(self, text: str) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None:
        self.memory_bytes[step] = self._family.resident_bytes(with_children=False)


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation."""

    config: Config
    watch: Watch
    steps: list[Metrics]
    """Metrics of the steps, as in `metrics.jsonl`."""
    account: Account
    faults: Faults
    virtual_s: float
    cpu_s: float
    peak_bytes: int


def simulate(
    config: Config, run: RunDirectory, speeds: Speeds, lengths: Lengths, trace: Trace | None = None,
    meter: Any = None, watch: Watch | None = None,
) -> Simulated:  # fmt: skip
    """Simulate a run; its records are in `run`, as a real run's.

    Args:
        trace: receives a line per call to an actor, the same in every simulation with the same arguments.
        meter: receives the CPU time of the actors, as the CpuMeter of profiling/benchmarks does.

    Raises:
        RunError: the run ended with an error.
    """
    run.create(config)
    clock, account = VirtualClock(), Account(config.max_token_age)
    watch = watch or Watch()
    prepared = prepared_for(config, speeds)
    lives: list[SimulatedActors] = []  # one between two restores
    books: list[GroupBook] = []

    def host(*args: Any) -> SimulatedActors:
        lives.append(
            SimulatedActors(*args, speeds=speeds, lengths=lengths, account=account, trace=trace, meter=meter)
        )
        return lives[-1]

    def drive(controller: Controller) -> None:
        books.append(controller.book)

        async def main() -> None:
            if meter is not None:
                asyncio.get_running_loop().set_task_factory(meter.make_task)
            if speeds.learner_life_s is not None:
                rng = random.Random(f"{config.run.seed}/learner/{len(lives)}")
                life_s = rng.expovariate(1 / speeds.learner_life_s)
                asyncio.get_running_loop().call_later(life_s, lives[-1].learner.die, "its time had come")
            await controller.run()

        clock.run(main())

    began = time.process_time()
    with simulated_by(clock):
        train_through_restores(config, prepared, run, watch, host, drive)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    faults = account.faults(books[-1])
    cpu_s = time.process_time() - began
    steps = list(StepLines(run.metrics_path))
    return Simulated(config, watch, steps, account, faults, clock.now, cpu_s, peak_bytes)


def prepared_for(config: Config, speeds: Speeds) -> Prepared:
    """Return prompts that all have the same length, and one validation prompt."""
    fresh = config.algorithm.num_steps * config.fresh_per_step
    parts = {name: min(MAX_EXAMPLES, fresh) for name in parts_of(config.task)}
    examples = [Example(str(n), "", task=name) for name, number in parts.items() for n in range(number)]
    token_ids = (END_TOKEN,) * speeds.prompt_tokens

    def tokenize(texts: list[str], *, add_special_tokens: bool) -> Any:
        return {"input_ids": [token_ids] * len(texts)}

    tokenizer: Any = tokenize
    prompters = {name: Prompter(TextTemplate("{question}"), tokenizer) for name in parts}
    return Prepared(
        model=StartingModel("simulated", (END_TOKEN,), speeds.prompt_tokens + config.sampling.max_tokens),
        validation=make_items(examples[:1], prompters),
        longest_prompt=speeds.prompt_tokens,
        prompts=PromptStream(examples, prompters, make_order(config.task, parts, config.run.seed)),
    )


def lines_of(simulated: Simulated) -> Iterator[str]:
    """Yield the lines of the summary that `grpo-ray simulate` prints."""
    config, steps, faults = simulated.config, simulated.steps, simulated.faults
    rows = [row for row in steps[FIRST_STEPS:] or steps if "timing/step_s" in row]  # a restored one has none
    seconds = [row["timing/step_s"] for row in rows]
    tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
    groups = config.algorithm.num_steps * config.algorithm.prompts_per_step
    yield (
        f"{config.generator.num_generators:,} Generators, {config.algorithm.num_steps:,} steps of "
        f"{config.algorithm.prompts_per_step:,} groups of {config.algorithm.samples_per_prompt}, max_lag "
        f"{config.weight_sync.max_lag}"
    )
    yield f"virtual time    {simulated.virtual_s:,.0f} s; it took {simulated.cpu_s:,.1f} s of CPU time"
    yield (
        f"step            mean {fmean(seconds):.2f} s, median {tenths[4]:.2f}, 10% {tenths[0]:.2f}, "
        f"90% {tenths[8]:.2f}, longest {max(seconds):.2f}"
    )
    yield f"Generators      sample {_share(rows, 'utilization/generators'):.0%} of the time; {_idle(rows)}"
    yield (
        f"Learner         trains {_share(rows, 'utilization/learner'):.0%} of the time; waits for groups "
        f"{sum(row['timing/wait_for_batch_s'] for row in rows) / sum(seconds):.0%}"
    )
    shares = list(simulated.account.lag_shares().items())
    listed = ", ".join(f"{lag}: {share:.1%}" for lag, share in shares[:MAX_LAGS])
    yield f"lag of tokens   {listed}" + (f", and up to {shares[-1][0]}" if shares[MAX_LAGS:] else "")
    yield f"bottleneck      {bottleneck(rows)}"
    yield (
        f"faults          {faults.num_stale} groups too old, {faults.num_lost} prompts lost, "
        f"{faults.num_repeated} repeated"
    )
    last = steps[-1]
    yield (
        f"recovery        {last['recovery/restarts']:.0f} restarts, {last['recovery/restores']:.0f} restores, "
        f"{sum(row['rollout/retried_groups'] for row in steps):.0f} groups sampled again"
    )
    yield f"memory          {_memory(simulated)}"
    yield f"CPU time        {1000 * simulated.cpu_s / groups:.2f} ms per group, simulated actors included"


def _share(rows: list[Metrics], name: str) -> float:
    """Return a share of the whole time from those of the steps, some of which are much longer than others."""
    known = [row for row in rows if name in row]
    whole = sum(row["timing/step_s"] for row in known)
    return sum(row[name] * row["timing/step_s"] for row in known) / whole if whole else 0.0


def _idle(rows: list[Metrics]) -> str:
    """Return the shares of the Generators' other stages, the largest first."""
    spent: dict[str, float] = {}
    for actor, stages in stage_seconds(rows).items():
        if actor == ALL or actor.startswith(GENERATOR):
            for stage, seconds in stages.items():
                spent[stage] = spent.get(stage, 0.0) + seconds
    whole = sum(spent.values()) or 1.0
    others = sorted(((s, stage) for stage, s in spent.items() if stage != "generate" and s > 0), reverse=True)
    return ", ".join(f"{stage.replace('_', ' ')} {s / whole:.0%}" for s, stage in others[:3]) or "nothing else"


def _memory(simulated: Simulated) -> str:
    """Return the resident memory of the process, halfway and at the end."""
    memory = simulated.watch.memory_bytes
    last = max(memory)
    half = max(1, last // 2)
    before, after = memory.get(half, memory[last]), memory[last]
    return (
        f"{before / 2**20:,.0f} MiB at step {half}, {after / 2**20:,.0f} at step {last} "
        f"({after / before - 1:+.1%}); peak {simulated.peak_bytes / 2**20:,.0f}"
    )
