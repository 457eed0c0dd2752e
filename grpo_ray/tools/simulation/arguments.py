"""The command `grpo-ray simulate`."""

import contextlib
import tempfile
from pathlib import Path

from grpo_ray.config.loading import load_config
from grpo_ray.errors import shown_plainly
from grpo_ray.tools.arguments import Command
from grpo_ray.tools.simulation.options import SimulateOptions


def _simulate(options: SimulateOptions) -> int:
    config = load_config(options.config, options.changes)
    from grpo_ray.telemetry.run_files import RunDirectory
    from grpo_ray.tools.simulation.print_simulated import print_simulated
    from grpo_ray.tools.simulation.simulate import simulate
    from grpo_ray.tools.simulation.speeds import LognormalLengths, read_speeds, recorded_lengths

    with shown_plainly(), contextlib.ExitStack() as open_files:
        speeds = read_speeds(options.speeds)
        mean = options.length_mean or config.sampling.max_tokens / 4
        lengths = (
            LognormalLengths(mean, options.length_sigma)
            if options.recorded is None
            else recorded_lengths(options.recorded)
        )
        trace = open_files.enter_context(Path(options.trace).open("w")) if options.trace else None
        folder = options.out or f"{open_files.enter_context(tempfile.TemporaryDirectory())}/run"
        simulated = simulate(config, RunDirectory(folder), speeds, lengths, trace.write if trace else None)
    print_simulated(simulated)
    return 0 if simulated.faults.is_none else 1


SIMULATE = Command(
    "simulate", SimulateOptions, _simulate, "simulate a run with any number of Generators, in virtual time",
    "Run a configuration's schedule with the real controller on simulated engines and a simulated Learner, "
    "in virtual time and without Ray: step times, utilization, lag, and what waits for what. Exits with 1 if a "
    "token was too old, or a prompt was lost or repeated; see docs/scale.md.",
)  # fmt: skip
