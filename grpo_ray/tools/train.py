"""`grpo-ray train`, `resume` and `check`: the run itself, and a look at its configuration before it."""

from argparse import ArgumentTypeError
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

from grpo_ray.cluster.placement import Node, amounts_of, bundles_of, listed, shortfalls
from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, find_config, load_config
from grpo_ray.errors import shown_plainly
from grpo_ray.records.visible_text import print_visible
from grpo_ray.tools.arguments import EXCLUSIVE, Argument, Command, ConfigFile, Flag, Local, Option, Overrides


@dataclass(frozen=True)
class TrainOptions:
    config: ConfigFile
    overrides: Overrides = ()
    local: Local = False


MANY_CPUS = 10**6
"""CPUs of a node where their number was not given."""


def _nodes(text: str) -> tuple[Node, ...]:
    """Convert `2x8` or `2x8x96`."""
    numbers = text.split("x")
    if not 2 <= len(numbers) <= 3 or not all(number.isdecimal() for number in numbers) or not int(numbers[0]):
        raise ArgumentTypeError(f"{text!r} is not NODESxGPUS, such as 2x8 (with CPUs: 2x8x96)")
    count, gpus, cpus = map(int, [*numbers, str(MANY_CPUS)][:3])
    return tuple(Node(f"node-{index}", {"GPU": gpus, "CPU": cpus}) for index in range(count))


@dataclass(frozen=True)
class CheckOptions:
    config: ConfigFile
    overrides: Overrides = ()
    nodes: Annotated[tuple[Node, ...] | None, Option(
        "NxGPUS", "compare with a cluster, such as 2x8: two nodes of eight GPUs; 2x8x96: each with 96 CPUs",
        type=_nodes, group=EXCLUSIVE,
    )] = None  # fmt: skip
    here: Annotated[bool, Flag("exit with 1 if this machine lacks something", group=EXCLUSIVE)] = False


@dataclass(frozen=True)
class ResumeOptions:
    run: Annotated[str, Argument("RUN", "the run's directory, such as runs/quickstart-20260101-120000-123456")]
    overrides: Overrides = ()
    local: Local = False


def _train(options: TrainOptions) -> int:
    # Refuses a mistake before Ray and torch are imported.
    config = load_config(options.config, options.overrides, options.local)
    from grpo_ray.run.training import train
    from grpo_ray.tools.report.ending import print_ending

    run = train(config, str(find_config(options.config)), options.local)
    print_ending(print_visible, run)
    return 0


def _sft(options: TrainOptions) -> int:
    config = load_config(options.config, options.overrides, options.local)
    if config.sft is None:
        raise ConfigError(
            f"{options.config}: has no section `sft`; give the file of demonstrations in sft.path"
        )
    from grpo_ray.run.training import train

    run = train(config, str(find_config(options.config)), options.local, is_sft_alone=True)
    what = "model.path" if config.model.adapter is None else "model.adapter.path"
    print_visible(f"{run.sft}: after {config.sft.num_steps} supervised steps; use it as {what}")
    return 0


def _resume(options: ResumeOptions) -> int:
    from grpo_ray.run.training import resume
    from grpo_ray.tools.report.ending import print_ending

    print_ending(print_visible, resume(options.run, options.overrides, options.local))
    return 0


def _check(options: CheckOptions) -> int:
    config = load_config(options.config, options.overrides)
    from grpo_ray.records.run_files import RunDirectory, run_name
    from grpo_ray.run.machine import on_this_machine, shortfalls_here, with_dtype_of
    from grpo_ray.run.preparation import check_files, with_trial
    from grpo_ray.watch.trackers import check_trackers

    run = RunDirectory(Path(config.run.output_dir) / run_name(config, options.config))
    config, notice = with_dtype_of(run, config), None
    if options.nodes is None:  # otherwise it is about other machines
        config, notice = on_this_machine(config)
    with shown_plainly():
        left = config.model_copy(update={"sft": None}) if run.sft.exists() else config  # as `train` does
        task = with_trial(left, check_files(left))
        check_trackers(config)
        if config.run.if_exists != "resume":
            run.check_free()
        elif run.config_path.exists():
            from grpo_ray.run.training import check_resume

            check_resume(run, config, task)
    print(f"{options.config}: good; {len(task.train)} training and {len(task.validation)} validation prompts")
    for line in filter(None, (notice, *task.notices, *task.first_prompts)):
        print_visible(f"  {line}")
    for line in (*model_lines(config), *bundle_lines(config)):
        print_visible(f"  {line}")
    if options.nodes is None:
        here = shortfalls_here(config)
        for line in here:
            print(f"  ! this machine lacks {line}: `train` would refuse to run here")
        return int(options.here and bool(here))
    lacking = shortfalls(config, options.nodes)
    for line in lacking:
        print(f"  ! {line}")
    return 1 if lacking else 0


def model_lines(config: Config) -> Iterator[str]:
    """Yield what the hub says of a model that is to come from it."""
    from grpo_ray.learning.model_files import at_commit, is_local

    for field, path in config.models.items():
        if not is_local(path):
            try:
                yield f"{field}: {at_commit(path, field)} on the hub, or in the local cache"
            except ValueError as error:
                yield f"! {error}; `train` will need it"


def bundle_lines(config: Config) -> Iterator[str]:
    """Yield the bundles in which a cluster must have room, equal ones of single actors in one line."""
    for (is_single, amounts), alike in groupby(
        bundles_of(config), lambda bundle: (len(bundle.actors) == 1, amounts_of(bundle.resources))
    ):
        bundles = list(alike)
        if is_single:
            times = f"{len(bundles)} x " if len(bundles) > 1 else ""
            yield f"{times}{amounts} for {listed(bundle.actors[0] for bundle in bundles)}"
        else:
            yield from (f"{amounts} on one node for {listed(bundle.actors)}" for bundle in bundles)


TRAIN = Command("train", TrainOptions, _train, "run a training job", group="Train")
SFT = Command(
    "sft", TrainOptions, _sft, "run only a configuration's supervised steps",
    "Run the supervised steps of the section `sft` and stop before GRPO; `resume` continues from there.",
)  # fmt: skip
RESUME = Command("resume", ResumeOptions, _resume, "resume a run from its last checkpoint", group="Train")
CHECK = Command(
    "check", CheckOptions, _check, "check a configuration before training",
    "Check a configuration and its files, and list the resources it needs per node. Exit status 1: with "
    "--nodes, that cluster lacks something; with --here, this machine does.",
    group="Train",
)  # fmt: skip
