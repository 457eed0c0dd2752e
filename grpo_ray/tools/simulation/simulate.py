"""A whole run in virtual time: the run's own controller, producer, buffer, weight sync and recovery.

Only the engines, the Learner (all its ranks as one), Scorers, Teachers and EnvironmentWorkers are simulated
(engine.py, workers.py, environments.py). No model, text or transport of weights is there, so checkpoints hold
no weights, and rewards mean nothing.
"""

import asyncio
import random
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config import Config
from grpo_ray.core.context import Prepared
from grpo_ray.core.controller import Controller
from grpo_ray.core.groups import GroupBook
from grpo_ray.records.evaluation_summary import EvaluationSummary
from grpo_ray.records.run_files import RunDirectory, last_of_each_step
from grpo_ray.run.restores import train_through_restores
from grpo_ray.tasks import make_order, parts_of
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_stream import PromptStream
from grpo_ray.tasks.prompts import Prompter, TextTemplate, make_items
from grpo_ray.tools.simulation.account import Account, Faults
from grpo_ray.tools.simulation.actors import SimulatedActors, Trace
from grpo_ray.tools.simulation.cpu_meter import CpuMeter
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.tools.simulation.virtual_time import VirtualClock
from grpo_ray.types import StartingModel
from grpo_ray.watch.clock import simulated_by
from grpo_ray.watch.memory import ProcessFamily
from grpo_ray.watch.run_log import Metrics

MAX_EXAMPLES = 4096  # per part; more only take memory
END_TOKEN = 0


@dataclass
class Watch:
    """The display of a simulated run: it notes the process's memory and CPU time, and keeps no metrics."""

    warnings: list[str] = field(default_factory=list)
    memory_bytes: dict[int, int] = field(default_factory=dict)
    """Resident memory of the whole process, by step."""
    cpu_s: dict[int, float] = field(default_factory=dict)
    """CPU seconds of the process so far, by step."""
    on_step: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self._family = ProcessFamily()

    def status(self, text: str) -> None: ...
    def evaluation(self, summary: EvaluationSummary) -> None: ...

    def step(self, step: int, metrics: Metrics) -> None:
        self.memory_bytes[step] = self._family.resident_bytes(with_children=False)
        self.cpu_s[step] = time.process_time()
        if self.on_step is not None:
            self.on_step(step)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


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
    config: Config,
    run: RunDirectory,
    speeds: Speeds,
    lengths: Lengths,
    trace: Trace | None = None,
    meter: CpuMeter | None = None,
    watch: Watch | None = None,
) -> Simulated:
    """Simulate a run; its records are in `run`, as a real run's.

    Args:
        trace: receives a line per call to an actor, the same in every simulation with the same arguments.
        meter: receives the CPU time of the actors.

    Raises:
        RunError: the run ended with an error.
    """
    run.create(config)
    clock, account = VirtualClock(), Account(config.max_token_age)
    watch = watch or Watch()
    prepared = prepared_for(config, speeds)
    lives: list[SimulatedActors] = []  # one between two restores
    books: list[GroupBook] = []

    @contextmanager
    def host(*args: Any) -> Iterator[SimulatedActors]:
        actors = SimulatedActors(
            *args, speeds=speeds, lengths=lengths, account=account, trace=trace, meter=meter
        )
        lives.append(actors)
        yield actors

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
    steps = last_of_each_step(run.metrics_path)
    return Simulated(config, watch, steps, account, faults, clock.now, cpu_s, peak_bytes)


def prepared_for(config: Config, speeds: Speeds) -> Prepared:
    """Return prompts that all have the same length, and one validation prompt."""
    fresh = config.algorithm.num_steps * config.fresh_per_step
    parts = {name: min(MAX_EXAMPLES, fresh) for name in parts_of(config.task)}
    examples = [Example(str(n), "", task=name) for name, number in parts.items() for n in range(number)]
    token_ids = (END_TOKEN,) * speeds.prompt_tokens

    def tokenize(text: str, *, add_special_tokens: bool) -> Any:
        return {"input_ids": token_ids}

    tokenizer: Any = tokenize
    prompters = {name: Prompter(TextTemplate("{question}"), tokenizer) for name in parts}
    return Prepared(
        model=StartingModel("simulated", (END_TOKEN,), speeds.prompt_tokens + config.sampling.max_tokens),
        validation=make_items(examples[:1], prompters),
        longest_prompt=speeds.prompt_tokens,
        prompts=PromptStream(examples, prompters, make_order(config.task, parts, config.run.seed)),
    )
