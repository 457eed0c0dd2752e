"""The command line: `grpo-ray train CONFIG [section.key=value ...]`, `resume RUN`, `check CONFIG`."""

import argparse
import os
import sys
from collections.abc import Sequence

from grpo_ray.config_loading import ConfigError, load_config
from grpo_ray.errors import RunError, shown_plainly

INTERRUPTED = 130  # the shell's exit status for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    _set_library_defaults()
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except KeyboardInterrupt as interrupt:
        hint = f"; {interrupt}" if str(interrupt) else ""
        print(f"\ninterrupted; all actors have been ended{hint}", file=sys.stderr)
        return INTERRUPTED
    except (RunError, ConfigError) as error:
        print(f"grpo-ray: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="grpo-ray", description="GRPO for language models on Ray and vLLM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="run a training job", description="Run a training job.")
    _add_config_arguments(train)
    train.set_defaults(command=_train)
    resume = commands.add_parser(
        "resume",
        help="go on with a run from its last checkpoint",
        description="Go on with a run from its last checkpoint.",
    )
    resume.add_argument("run", metavar="RUN", help="the run's folder, such as runs/quickstart-20260101-120000")
    _add_overrides(resume)
    resume.set_defaults(command=_resume)
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
    _add_config_arguments(check)
    check.set_defaults(command=_check)
    return parser


def _add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/quickstart.yaml")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="changes, such as learner.learning_rate=1e-4"
    )


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)  # before Ray and torch are even imported
    from grpo_ray.training import train

    train(config, options.config)
    return 0


def _resume(options: argparse.Namespace) -> int:
    from grpo_ray.training import resume

    resume(options.run, options.overrides)
    return 0


def _audit(options: argparse.Namespace) -> int:
    from grpo_ray.audit import audit
    from grpo_ray.telemetry.run_files import RunDirectory

    run = RunDirectory(options.run)
    if not run.config_path.exists():
        raise RunError(f"{options.run}: no run to audit (it has no config.yaml)")
    with shown_plainly():
        report = audit(run)
    print(report)
    return 0 if report.is_clean else 1


def _check(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    from grpo_ray.preflight import check_files

    with shown_plainly():
        task = check_files(config)
    print(f"{options.config}: good; {len(task.train)} training and {len(task.validation)} validation prompts")
    for notice in task.notices:
        print(f"  {notice}")
    return 0


def _set_library_defaults() -> None:
    """Their progress bars and notices would bury ours; the actors' own output goes to the run's logs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    # Threads that spin while they wait make a busy machine several times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


if __name__ == "__main__":
    sys.exit(main())
