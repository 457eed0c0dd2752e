"""The command `grpo-ray simulate`."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ray.config.loading import load_config
from grpo_ray.errors import shown_plainly
from grpo_ray.tools.arguments import Command
from grpo_ray.tools.simulation.options import SimulateOptions

if TYPE_CHECKING:
    from grpo_ray.config import Config
    from grpo_ray.tools.simulation.speeds import Lengths, Speeds


def _simulate(options: SimulateOptions) -> int:
    config = load_config(options.config, options.changes)
    from grpo_ray.telemetry.memory import imports_left_alone
    from grpo_ray.telemetry.run_files import RunDirectory
    from grpo_ray.tools.simulation.print_simulated import print_simulated
    from grpo_ray.tools.simulation.simulate import simulate

    with shown_plainly(), imports_left_alone(), contextlib.ExitStack() as open_files:
        speeds, lengths = _speeds(options), _lengths(options, config)
        trace = open_files.enter_context(Path(options.trace).open("w")) if options.trace else None
        folder = options.out or f"{open_files.enter_context(tempfile.TemporaryDirectory())}/run"
        simulated = simulate(config, RunDirectory(folder), speeds, lengths, trace.write if trace else None)
    print_simulated(simulated)
    return 0 if simulated.faults.is_none else 1


def _speeds(options: SimulateOptions) -> "Speeds":
    from grpo_ray.tools.simulation.calibration import calibrate, lines_of
    from grpo_ray.tools.simulation.records import read_run
    from grpo_ray.tools.simulation.speeds import Speeds, read_speeds

    if not options.calibrate:
        if options.cores is not None or options.save_speeds is not None:
            raise ValueError(
                '--cores and --save-speeds go with --calibrate; a file of --speeds may hold "cores"'
            )
        return read_speeds(options.speeds)
    if options.speeds is not None:
        raise ValueError("--speeds and --calibrate both give the speeds; leave one of them out")
    found = calibrate([read_run(run) for run in options.calibrate], options.cores)
    for line in lines_of(found):
        print(line)
    if options.save_speeds is not None:
        Path(options.save_speeds).write_text(json.dumps(found.speeds, indent=2) + "\n")
    return Speeds.model_validate(found.speeds)


def _lengths(options: SimulateOptions, config: "Config") -> "Lengths":
    from grpo_ray.tools.simulation.speeds import LognormalLengths, recorded_lengths, replayed_lengths

    if options.replay is not None:
        if options.recorded is not None:
            raise ValueError("--recorded and --replay both give the lengths; leave one of them out")
        return replayed_lengths(options.replay, config.algorithm.samples_per_prompt)
    if options.recorded is not None:
        return recorded_lengths(options.recorded)
    return LognormalLengths(options.length_mean or config.sampling.max_tokens / 4, options.length_sigma)


SIMULATE = Command(
    "simulate", SimulateOptions, _simulate, "simulate a run with any number of Generators, in virtual time",
    "Run a configuration's schedule with the real controller on simulated engines and a simulated Learner, "
    "in virtual time and without Ray: step times, utilization, lag, and what waits for what. Exits with 1 if a "
    "token was too old, or a prompt was lost or repeated; see docs/scale.md.",
)  # fmt: skip
