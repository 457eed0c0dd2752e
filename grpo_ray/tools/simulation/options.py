"""The options of `grpo-ray simulate`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.tools.arguments import ConfigFile, Option, Overrides, above_zero, natural, non_negative, positive

RESPONSES = "Lengths of the responses"
SPEEDS = "Speeds of the actors"


@dataclass(frozen=True)
class SimulateOptions:
    config: ConfigFile
    overrides: Overrides = ()
    generators: Annotated[
        int | None,
        Option("N", "Generators (default: generator.num_generators)", type=positive),
    ] = None
    steps: Annotated[int | None, Option("N", "steps (default: algorithm.num_steps)", type=positive)] = None
    seed: Annotated[
        int | None, Option("N", "seed of lengths, rewards and faults (default: run.seed)", type=natural)
    ] = None
    length_mean: Annotated[
        float | None,
        Option(
            "TOKENS", "mean of a lognormal distribution (default: a quarter of sampling.max_tokens)",
            type=above_zero, group=RESPONSES,
        ),
    ] = None  # fmt: skip
    length_sigma: Annotated[
        float,
        Option(
            "SIGMA", "standard deviation of the lengths' logarithm; 0: all are the same (default: %(default)s)",
            type=non_negative, group=RESPONSES,
        ),
    ] = 1.0  # fmt: skip
    recorded: Annotated[
        str | None,
        Option("RUN", "draw the lengths of a run's responses instead (its rollouts/)", group=RESPONSES),
    ] = None
    replay: Annotated[
        str | None,
        Option("RUN", "give each group the lengths of a run's group, in the run's order", group=RESPONSES),
    ] = None
    speeds: Annotated[
        str | None, Option("FILE", "JSON with speeds of the actors in seconds; see docs/scale.md", group=SPEEDS)
    ] = None
    calibrate: Annotated[
        tuple[str, ...],
        Option("RUN", "fit the speeds to a finished run instead; may be repeated", group=SPEEDS),
    ] = ()
    cores: Annotated[
        float | None,
        Option("N", "with --calibrate: cores that all actors share", type=above_zero, group=SPEEDS),
    ] = None
    save_speeds: Annotated[
        str | None, Option("FILE", "with --calibrate: write the speeds for --speeds", group=SPEEDS)
    ] = None
    out: Annotated[str | None, Option("DIR", "keep the run's records in this folder, which must be free")] = (
        None
    )
    trace: Annotated[str | None, Option("FILE", "write a line per call to an actor")] = None

    @property
    def changes(self) -> list[str]:
        """The overrides of the configuration, those of other options last."""
        given = {
            "generator.num_generators": self.generators,
            "algorithm.num_steps": self.steps,
            "run.seed": self.seed,
        }
        own = [f"{name}={value}" for name, value in given.items() if value is not None]
        return [*DEFAULTS, *self.overrides, *own]


DEFAULTS = ("run.save_rollouts=false", "evaluation.every_num_steps=1000000")
"""A simulation writes no rollouts and validates at the start and the end, unless overrides say otherwise."""
