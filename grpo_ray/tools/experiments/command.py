"""The commands `grpo-ray experiment` and `grpo-ray sweep`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.tools.arguments import Argument, Command, ConfigFile, Flag, Option, Overrides, positive

if TYPE_CHECKING:
    from grpo_ray.tools.experiments.experiment import Experiment

Seeds = Annotated[int, Option("N", "runs per variant (default: %(default)s)")]
Output = Annotated[str, Option("FOLDER", "folder for the results (default: %(default)s)")]
Jobs = Annotated[int | None, Option("N", "runs at a time (default: as many as fit the machine)", type=positive)]


@dataclass(frozen=True)
class ExperimentOptions:
    name: Annotated[
        str | None, Argument("NAME", "an experiment that --list prints, or your own as module:function")
    ] = None
    list: Annotated[bool, Flag("print the experiments and exit")] = False
    config: Annotated[str, Option("CONFIG", "the job (default: %(default)s)")] = "quickstart"
    seeds: Seeds = 3
    output: Output = "experiments"
    jobs: Jobs = None
    overrides: Overrides = ()
    typed: str = ""


@dataclass(frozen=True)
class SweepOptions:
    config: ConfigFile
    overrides: Overrides = ()
    name: Annotated[str | None, Option("NAME", "the folder's name (default: from the keys)")] = None
    seeds: Seeds = 1
    output: Output = "experiments"
    jobs: Jobs = None
    typed: str = ""


def _experiment(options: ExperimentOptions) -> int:
    from grpo_ray.tools.experiments.experiment import EXPERIMENTS, find

    if options.list:
        width = max(map(len, EXPERIMENTS))
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:<{width}}  {experiment.title} ({', '.join(experiment.variants)})")
        return 0
    with shown_plainly():
        experiment = find(options.name or "", EXPERIMENTS)
    return _run(experiment, options, options.overrides)


def _sweep(options: SweepOptions) -> int:
    from grpo_ray.tools.experiments.experiment import make_sweep

    return _run(make_sweep(options.config, options.overrides, options.name), options, ())


def _run(experiment: "Experiment", chosen: ExperimentOptions | SweepOptions, overrides: Sequence[str]) -> int:
    from grpo_ray.tools.experiments.run_experiment import run_experiment

    given = (chosen.config, overrides, chosen.seeds, chosen.output, chosen.jobs, chosen.typed)
    return 0 if run_experiment(experiment, *given) else 1


EXPERIMENT = Command(
    "experiment", ExperimentOptions, _experiment, "compare variants of a job over seeds",
    "Run one of the bundled comparisons; the same command resumes it.",
)  # fmt: skip
SWEEP = Command(
    "sweep", SweepOptions, _sweep, "compare every combination of some values",
    "Run every combination of the values, such as learner.learning_rate=1e-4,2e-4.",
)  # fmt: skip
