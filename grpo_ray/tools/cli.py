"""The command line: `grpo-ray train CONFIG [section.key=value ...]`, `resume RUN`, `experiment NAME`, ..."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.errors import INTERRUPTED, RunError, shown_plainly
from grpo_ray.tools.arguments import add_config, add_overrides, positive
from grpo_ray.tools.course.keyword_data.arguments import add_data
from grpo_ray.tools.course.playground.arguments import add_playground
from grpo_ray.tools.evaluation.arguments import add_evaluate
from grpo_ray.tools.planning.arguments import add_plan
from grpo_ray.tools.report.arguments import add_report
from grpo_ray.tools.submit.arguments import add_submit
from grpo_ray.tools.top.arguments import add_top

if TYPE_CHECKING:
    from grpo_ray.tools.experiments.experiment import Experiment


def main(arguments: Sequence[str] | None = None) -> int:
    set_library_defaults()
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    options.typed = shlex.join(["grpo-ray", *arguments])
    try:
        return int(options.command(options))
    except KeyboardInterrupt as interrupt:
        hint = f"; {interrupt}" if str(interrupt) else ""
        print(f"\ninterrupted; all actors have been ended{hint}", file=sys.stderr)
        return INTERRUPTED
    except (RunError, ConfigError) as error:
        print(f"grpo-ray: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """With overrides before and after options, which argparse itself takes in one place only."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(argument.startswith("-") for argument in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-ray", description="GRPO for language models on Ray and vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a training job", description="Run a training job.")
    add_config(train)
    add_overrides(train)
    train.set_defaults(command=_train)
    resume = commands.add_parser(
        "resume",
        help="go on with a run from its last checkpoint",
        description="Go on with a run from its last checkpoint.",
    )
    resume.add_argument("run", metavar="RUN", help="the run's folder, such as runs/quickstart-20260101-120000")
    add_overrides(resume)
    resume.set_defaults(command=_resume)
    add_submit(commands.add_parser(
        "submit",
        help="run a job on a Ray cluster",
        description="Submit a training run to a Ray cluster, follow it, stop it; see docs/cluster.md.",
    ))  # fmt: skip
    audit = commands.add_parser(
        "audit",
        help="check a run's own records",
        description="Check a run's own records: every prompt trained once, no token too old, true rewards.",
    )
    audit.add_argument("run", metavar="RUN", help="the run's folder")
    audit.set_defaults(command=_audit)
    check = commands.add_parser(
        "check",
        help="check a configuration and its files",
        description="Check a configuration and its files.",
    )
    add_config(check)
    add_overrides(check)
    check.set_defaults(command=_check)
    add_plan(commands.add_parser(
        "plan",
        help="whether a configuration fits its devices",
        description="Memory against the devices, and the time of a step; starts nothing. See docs/plan.md.",
    ))  # fmt: skip
    add_top(commands.add_parser(
        "top",
        help="watch a run in the terminal",
        description="Watch a run in the terminal while it goes on: actors, steps, and what holds it up. "
        "q or Ctrl-C ends only the watching.",
    ))  # fmt: skip
    _add_experiment(commands.add_parser(
        "experiment",
        help="compare variants of a job over seeds",
        description="Run a comparison that comes with grpo_ray; a second start goes on with it.",
    ))  # fmt: skip
    _add_sweep(commands.add_parser(
        "sweep",
        help="compare every combination of some values",
        description="Run every combination of the values, such as learner.learning_rate=1e-4,2e-4.",
    ))  # fmt: skip
    add_evaluate(commands.add_parser(
        "evaluate",
        help="sample and grade a model's answers",
        description="Sample and grade answers of a model, of a run's checkpoint, or of all of them.",
    ))  # fmt: skip
    add_report(commands.add_parser(
        "report",
        help="a web page of a run, or of several",
        description="Write a web page of a run, or of several overlaid: one file that needs no network.",
    ))  # fmt: skip
    add_data(commands.add_parser("data", help="make a dataset", description="Make a dataset."))
    add_playground(commands.add_parser(
        "playground",
        help="a lecture's small examples of policy gradients",
        description="The examples of Stanford CS336's lecture on policy gradients; see docs/playground.md.",
    ))  # fmt: skip
    return parser


def _add_experiment(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="one of those that --list prints")
    parser.add_argument("--list", action="store_true", help="print the experiments and end")
    parser.add_argument("--config", default="configs/quickstart.yaml", help="the job (default: %(default)s)")
    _add_comparison_arguments(parser, num_seeds=3)
    add_overrides(parser)
    parser.set_defaults(command=_experiment)


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_overrides(parser)
    parser.add_argument("--name", help="the folder's name (default: from the keys)")
    _add_comparison_arguments(parser, num_seeds=1)
    parser.set_defaults(command=_sweep)


def _add_comparison_arguments(parser: argparse.ArgumentParser, num_seeds: int) -> None:
    parser.add_argument("--seeds", type=int, default=num_seeds, help="runs a variant (default: %(default)s)")
    parser.add_argument("--output", default="experiments", help="folder for results (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, help="runs at a time (default: as the machine has room for)")


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)  # before Ray and torch are even imported
    from grpo_ray.run.training import train
    from grpo_ray.tools.report.ending import print_ending

    print_ending(print, train(config, options.config))
    return 0


def _resume(options: argparse.Namespace) -> int:
    from grpo_ray.run.training import resume
    from grpo_ray.tools.report.ending import print_ending

    print_ending(print, resume(options.run, options.overrides))
    return 0


def _audit(options: argparse.Namespace) -> int:
    from grpo_ray.telemetry.run_files import RunDirectory
    from grpo_ray.tools.audit.audit import audit

    run = RunDirectory(options.run)
    if not run.config_path.exists():
        raise RunError(f"{options.run}: no run to audit (it has no config.yaml)")
    with shown_plainly():
        report = audit(run)
    print(report)
    return 0 if report.is_clean else 1


def _check(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    from grpo_ray.run.preflight import check_files
    from grpo_ray.telemetry.trackers import check_trackers

    with shown_plainly():
        task = check_files(config)
        check_trackers(config)
    print(f"{options.config}: good; {len(task.train)} training and {len(task.validation)} validation prompts")
    for notice in task.notices:
        print(f"  {notice}")
    return 0


def _experiment(options: argparse.Namespace) -> int:
    from grpo_ray.tools.experiments.definitions import EXPERIMENTS
    from grpo_ray.tools.experiments.experiment import find

    if options.list:
        width = max(map(len, EXPERIMENTS))
        for experiment in EXPERIMENTS.values():
            print(f"{experiment.name:<{width}}  {experiment.title} ({', '.join(experiment.variants)})")
        return 0
    return _compare(options, find(options.name or "", EXPERIMENTS), options.overrides)


def _sweep(options: argparse.Namespace) -> int:
    from grpo_ray.tools.experiments.sweep import make_sweep

    return _compare(options, make_sweep(options.config, options.overrides, options.name), [])


def _compare(options: argparse.Namespace, experiment: "Experiment", overrides: Sequence[str]) -> int:
    from grpo_ray.tools.experiments.run_experiment import run_experiment

    is_good = run_experiment(
        experiment, options.config, overrides, options.seeds, options.output, options.jobs, options.typed
    )
    return 0 if is_good else 1


def set_library_defaults() -> None:
    """Their progress bars and notices would bury ours; the actors' own output goes to the run's logs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Threads that spin while they wait make a busy machine several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
