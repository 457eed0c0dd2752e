"""The command line: `grpo-ray train CONFIG [section.key=value ...]`."""

import argparse
import os
import sys
from collections.abc import Sequence

from grpo_ray.config_loading import ConfigError, load_config
from grpo_ray.errors import RunError, shown_plainly

INTERRUPTED = 130  # the shell's exit status for Ctrl-C


def main(arguments: Sequence[str] | None = None) -> int:
    _quieten_libraries()
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        print("\ninterrupted; all actors have been ended", file=sys.stderr)
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
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="changes, such as learner.learning_rate=1e-4"
    )


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)  # before Ray and torch are even imported
    from grpo_ray.training import train

    train(config, options.config)
    return 0


def _check(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    from grpo_ray.preflight import check_files

    with shown_plainly():
        task = check_files(config)
    print(f"{options.config}: good; {len(task.train)} training and {len(task.validation)} validation prompts")
    return 0


def _quieten_libraries() -> None:
    """Their progress bars and notices would bury ours; the actors' own output goes to the run's logs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")


if __name__ == "__main__":
    sys.exit(main())
