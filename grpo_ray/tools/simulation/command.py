"""The command `grpo-ray simulate`."""

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.tools.arguments import (
    Command,
    ConfigFile,
    Option,
    Overrides,
    above_zero,
    natural,
    non_negative,
    positive,
)

if TYPE_CHECKING:
    from grpo_ray.config import Config
    from grpo_ray.tools.simulation.speeds import Lengths


RESPONSES = "Lengths of the responses"
SPEEDS = "Speeds of the actors"


@dataclass(frozen=True)
class SimulateOptions:
    config: ConfigFile
    overrides: Overrides = ()
    generators: Annotated[
        int | None, Option("N", "Generators (default: generator.num_generators)", type=positive)
    ] = None
    steps: Annotated[int | None, Option("N", "steps (default: algorithm.num_steps)", type=positive)] = None
    seed: Annotated[
        int | None, Option("N", "seed of lengths, rewards and faults (default: run.seed)", type=natural)
    ] = None
    length_mean: Annotated[float | None, Option(
        "TOKENS", "mean of a lognormal distribution (default: a quarter of sampling.max_tokens)",
        type=above_zero, group=RESPONSES,
    )] = None  # fmt: skip
    length_sigma: Annotated[float, Option(
        "SIGMA", "standard deviation of the logarithm of lengths; 0: all are equal (default: %(default)s)",
        type=non_negative, group=RESPONSES,
    )] = 1.0  # fmt: skip
    recorded: Annotated[
        str | None, Option("RUN", "draw lengths from the responses of a run (its rollouts/)", group=RESPONSES)
    ] = None
    speeds: Annotated[
        str | None,
        Option("FILE", "JSON file of the actors' speeds in seconds; see docs/lab/scale.md", group=SPEEDS),
    ] = None
    out: Annotated[str | None, Option("DIR", "keep the run's records in this new folder")] = None
    trace: Annotated[str | None, Option("FILE", "write one line per call to an actor")] = None


DEFAULTS = ("run.save_rollouts=false", "evaluation.every_num_steps=1000000")
"""A simulation writes no rollouts and validates at the start and the end, unless overrides say otherwise."""


def _simulate(options: SimulateOptions) -> int:
    given = {
        "generator.num_generators": options.generators,
        "algorithm.num_steps": options.steps,
        "run.seed": options.seed,
    }
    own = [f"{name}={value}" for name, value in given.items() if value is not None]
    config = load_config(options.config, [*DEFAULTS, *options.overrides, *own])
    from grpo_ray.records.run_files import RunDirectory
    from grpo_ray.tools.simulation.simulate import lines_of, simulate
    from grpo_ray.tools.simulation.speeds import read_speeds
    from grpo_ray.watch.memory import imports_left_alone

    with shown_plainly(), imports_left_alone(), contextlib.ExitStack() as open_files:
        speeds, lengths = read_speeds(options.speeds), _lengths(options, config)
        trace = open_files.enter_context(Path(options.trace).open("w")) if options.trace else None
        folder = options.out or f"{open_files.enter_context(tempfile.TemporaryDirectory())}/run"
        if options.out and Path(folder).exists():
            raise ValueError(f"--out {folder}: it exists already; give a new folder")
        try:
            simulated = simulate(config, RunDirectory(folder), speeds, lengths, trace.write if trace else None)
        except RunError as error:
            if options.out:
                raise
            cause = str(error).partition("\n")[0]  # the rest names a folder that is about to be deleted
            raise RunError(f"{cause}\nGive --out DIR to keep the run's records") from error
    print(*lines_of(simulated), sep="\n")
    return 0 if simulated.faults.is_none else 1


def _lengths(options: SimulateOptions, config: "Config") -> "Lengths":
    from grpo_ray.tools.simulation.speeds import lognormal, read_lengths, recorded

    if options.recorded is not None:
        if options.length_mean is not None or options.length_sigma != SimulateOptions.length_sigma:
            raise ValueError("--recorded gives the lengths; leave out --length-mean and --length-sigma")
        return recorded(read_lengths(options.recorded))
    return lognormal(options.length_mean or config.sampling.max_tokens / 4, options.length_sigma)


SIMULATE = Command(
    "simulate", SimulateOptions, _simulate, "simulate a run with any number of Generators, in virtual time",
    "Run a configuration's schedule in virtual time, without Ray: the real controller on simulated engines "
    "and a simulated Learner. Prints step times, utilization, lag, and what waits for what. Exit status 1: a "
    "token was too old, or a prompt was lost or repeated; see docs/lab/scale.md.",
)  # fmt: skip
