"""Control at 64, 256 and 1,024 engines: CPU time per group and per step, on simulated actors in virtual time.

All actors share the process with the controller. Their own CPU time is measured and left out, as is that of
their simulated clients, which stand for Ray's; all else in the process, the event loop included, counts as the
controller's. *Control* is the controller, the clients, WeightSync and the buffer together: all of their CPU
time is an upper bound of the time by which they can lengthen a step.
"""

import asyncio
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART
from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.simulation.simulate import Watch, simulate
from grpo_ray.tools.simulation.speeds import Speeds, lognormal
from grpo_ray.watch.memory import imports_left_alone

TITLE = "control at scale: CPU time per group of 8 and per step, with 64, 256 and 1,024 simulated engines"
SIZES, SMALL_SIZES = (64, 256, 1024), (2, 4, 8)
GROUPS, SMALL_GROUPS = 1024, 8  # per step
FIRST_STEPS, MEASURED_STEPS = 2, 4  # the first ones start the actors, and fill the queue
SPEEDS = Speeds(train_s=16.0)  # with the tokens of 1,024 groups a step takes about 60 s
CONTROL = "client", "weight_sync", "buffer"  # what is no work of the model
CHANGES = [
    "algorithm.samples_per_prompt=8", "sampling.max_tokens=2048", "weight_sync.max_lag=1",
    "weight_sync.in_flight=true", "run.save_rollouts=false",
    "evaluation.every_num_steps=1000000", "checkpoint.every_num_steps=1000000",
]  # fmt: skip


_actor: ContextVar[str | None] = ContextVar("actor", default=None)
"""Kind of the actor that runs now; the tasks that it creates inherit it."""


class CpuMeter:
    """CPU seconds by kind of actor (`generator`, `scorer`, `buffer`, ...), and of all their clients (`client`).

    Each second counts once: work within other work is not that other work's.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._counted = 0.0  # seconds, of all kinds

    def begin(self) -> tuple[float, float]:
        """Begin to count; `end` takes what this returns."""
        return time.thread_time(), self._counted

    def end(self, kind: str, begun: tuple[float, float]) -> None:
        """Count the CPU time since `begin`, without what was counted meanwhile."""
        spent = time.thread_time() - begun[0]
        self.seconds[kind] += spent - (self._counted - begun[1])
        self._counted = begun[1] + spent

    async def metered(self, name: str, work: Awaitable[Any]) -> Any:
        """Do an actor's work, of which the time counts while it runs, not while it waits."""
        return await self._steps(name.partition("-")[0], work)

    @types.coroutine
    def _steps(self, kind: str, work: Awaitable[Any]) -> Generator[Any, Any, Any]:
        _actor.set(kind)
        steps: Any = work.__await__()
        resume, value = steps.send, None
        while True:
            begun = self.begin()
            try:
                waits_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.end(kind, begun)
            try:
                value = yield waits_for
                resume = steps.send
            except BaseException as error:
                resume, value = steps.throw, error

    def make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: Context | None = None,
    ) -> "asyncio.Task[Any]":  # fmt: skip
        """Make a task, as the loop's task factory; the time of one that an actor creates is the actor's."""
        kind = _actor.get() if context is None else context.get(_actor)
        assert asyncio.iscoroutine(work)
        counted = work if kind is None else self.metered(kind, work)
        return asyncio.Task(counted, loop=loop, context=context)

    def timer(self, name: str, callback: Callable[[], None]) -> Callable[[], None]:
        """Return the callback of an actor's timer, with its time counted."""
        kind = name.partition("-")[0]

        def run() -> None:
            begun = self.begin()
            callback()
            self.end(kind, begun)

        return run


def run(options: Options) -> list[Row]:
    sizes = SMALL_SIZES if options.quick else SIZES
    groups = SMALL_GROUPS if options.quick else GROUPS
    measured: dict[int, list[dict[str, float]]] = {size: [] for size in sizes}
    with imports_left_alone():  # as in a run
        for _ in range(options.rounds or (1 if options.quick else 3)):
            for size in sizes:
                measured[size].append(_measure(size, groups))
    return [_row(size, measured[size], f"{sizes[0]:,} engines", groups) for size in sizes]


def _row(size: int, rounds: list[dict[str, float]], baseline: str, groups: int) -> Row:
    work = groups * MEASURED_STEPS
    seconds = {name: median(each[name] for each in rounds) for name in rounds[0]}
    step_s, control_s = seconds.pop("step"), seconds.pop("control")
    facts = {f"{name}_ms_per_group": 1000 * value / work for name, value in seconds.items()}
    facts["all_ms_per_group"] = sum(facts.values())
    facts["step_s"] = step_s
    facts["controller_share_of_step"] = seconds["controller"] / (MEASURED_STEPS * step_s)
    facts["control_share_of_step"] = control_s / (MEASURED_STEPS * step_s)
    return Row(f"{size:,} engines", tuple(r["controller"] for r in rounds), baseline, work, "groups", facts)


def _measure(num_generators: int, groups: int) -> dict[str, float]:
    """Return the CPU seconds of the measured steps, and the mean length of a step in virtual time."""
    num_steps = FIRST_STEPS + MEASURED_STEPS
    sizes = [f"generator.num_generators={num_generators}", f"algorithm.prompts_per_step={groups}"]
    config = load_config(QUICKSTART, [*CHANGES, *sizes, f"algorithm.num_steps={num_steps}"])
    meter, of_actors = CpuMeter(), {}

    class Noting(Watch):
        def step(self, step: int, metrics: dict[str, float]) -> None:
            of_actors[step] = {**meter.seconds, "process": time.process_time()}

    with tempfile.TemporaryDirectory() as folder:
        run_dir, lengths = RunDirectory(Path(folder) / "run"), lognormal(512.0, 1.0)
        simulated = simulate(config, run_dir, SPEEDS, lengths, meter=meter, watch=Noting())
    first, last = FIRST_STEPS, num_steps
    spent = {kind: of_actors[last][kind] - of_actors[first][kind] for kind in of_actors[first]}
    process_s, clients_s, counted_s = spent.pop("process"), spent["client"], sum(spent.values())
    controller_s = process_s - counted_s
    control_s = controller_s + sum(spent[kind] for kind in CONTROL)
    step_s = fmean(row["timing/step_s"] for row in simulated.steps[first:])
    return {
        "controller": controller_s, "clients": clients_s, "actors": counted_s - clients_s,
        "control": control_s, "step": step_s,
    }  # fmt: skip
