"""The controller at 64, 256 and 1,024 engines: CPU time per group, on simulated actors in virtual time.

All actors share the process with the controller. Their own CPU time is measured and left out; the time of their
clients and of the event loop counts as the controller's.
"""

import tempfile
from pathlib import Path
from statistics import median

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART
from grpo_ray.config.loading import load_config
from grpo_ray.telemetry.run_files import RunDirectory
from grpo_ray.tools.simulation.cpu_meter import CpuMeter
from grpo_ray.tools.simulation.simulate import Watch, simulate
from grpo_ray.tools.simulation.speeds import LognormalLengths, Speeds

TITLE = "the controller at scale: CPU time per group of 8, with 64, 256 and 1,024 simulated engines"
SIZES, SMALL_SIZES = (64, 256, 1024), (2, 4, 8)
GROUPS, SMALL_GROUPS = 1024, 8  # per step
FIRST_STEPS, MEASURED_STEPS = 2, 4  # the first ones start the actors, and fill the queue
CHANGES = [
    "algorithm.samples_per_prompt=8",
    "sampling.max_tokens=2048",
    "weight_sync.max_lag=1",
    "weight_sync.in_flight=true",
    "run.save_rollouts=false",
    "evaluation.every_num_steps=1000000",
    "checkpoint.every_num_steps=1000000",
]


def run(options: Options) -> list[Row]:
    sizes = SMALL_SIZES if options.quick else SIZES
    groups = SMALL_GROUPS if options.quick else GROUPS
    seconds: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    for _ in range(options.rounds or (1 if options.quick else 3)):
        for size in sizes:
            seconds[size].append(_measure(size, groups))
    work = groups * MEASURED_STEPS
    return [
        Row(
            f"{size:,} engines",
            tuple(own for own, _ in seconds[size]),
            f"{sizes[0]:,} engines",
            work,
            "groups",
            {
                "controller_ms_per_group": 1000 * median(own for own, _ in seconds[size]) / work,
                "actors_ms_per_group": 1000 * median(actors for _, actors in seconds[size]) / work,
            },
        )
        for size in sizes
    ]


def _measure(num_generators: int, groups: int) -> tuple[float, float]:
    """Return the CPU seconds of the measured steps: the controller's, and those of all actors."""
    num_steps = FIRST_STEPS + MEASURED_STEPS
    sizes = [f"generator.num_generators={num_generators}", f"algorithm.prompts_per_step={groups}"]
    config = load_config(QUICKSTART, [*CHANGES, *sizes, f"algorithm.num_steps={num_steps}"])
    meter, of_actors = CpuMeter(), {}

    def note(step: int) -> None:
        of_actors[step] = sum(meter.seconds.values())

    watch = Watch(on_step=note)
    with tempfile.TemporaryDirectory() as folder:
        run_dir, lengths = RunDirectory(Path(folder) / "run"), LognormalLengths(512.0, 1.0)
        simulate(config, run_dir, Speeds(), lengths, meter=meter, watch=watch)
    first, last = FIRST_STEPS, num_steps
    actors_s = of_actors[last] - of_actors[first]
    return watch.cpu_s[last] - watch.cpu_s[first] - actors_s, actors_s
