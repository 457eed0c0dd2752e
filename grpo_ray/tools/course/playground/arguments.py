"""The arguments of `grpo-ray playground`."""

import argparse

from grpo_ray.errors import RunError
from grpo_ray.tools.arguments import positive
from grpo_ray.tools.course.playground.settings import COMPARISONS, Settings, allowed, option

EXAMPLES = {
    "sorting": "train the lecture's small model to sort numbers",
    "baseline": "show on two states how much noise a baseline removes from the gradient",
    "frozen": "compare the frozen ratio with one that is not, and with one of log-probabilities",
}


def add_playground(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="print the examples and exit")
    parser.set_defaults(command=_list)
    examples = parser.add_subparsers(metavar="EXAMPLE")
    parsers = {name: examples.add_parser(name, help=text, description=text) for name, text in EXAMPLES.items()}
    for example in parsers.values():
        example.add_argument(
            "--output", metavar="FOLDER", default="playground", help="folder for results (default: %(default)s)"
        )
    _add_sorting(parsers["sorting"])
    parsers["baseline"].add_argument(
        "--samples",
        type=positive,
        metavar="N",
        default=10,
        help="samples per estimate of the gradient (default: %(default)s)",
    )
    parsers["baseline"].set_defaults(command=_baseline)
    parsers["frozen"].set_defaults(command=_frozen)


def _add_sorting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--compare", choices=COMPARISONS, help="compare all values of this setting")
    parser.add_argument(
        "--seeds", type=positive, metavar="N", default=5, help="runs per setting (default: %(default)s)"
    )
    settings = parser.add_argument_group("settings (the defaults are the lecture's)")
    for name, field in Settings.model_fields.items():
        text = f"{field.description}: {allowed(name)} (default: {field.default})"
        settings.add_argument(option(name), metavar="X", help=text)
    parser.set_defaults(command=_sorting)


def _list(options: argparse.Namespace) -> int:
    if not options.list:
        raise RunError(f"name an example of the playground: {', '.join(EXAMPLES)}")
    for name, text in EXAMPLES.items():
        print(f"{name:<8}  {text}")
    return 0


def _sorting(options: argparse.Namespace) -> int:
    from grpo_ray.tools.course.playground.play import run_sorting

    given = {name: value for name in Settings.model_fields if (value := getattr(options, name)) is not None}
    return run_sorting(given, options.compare, options.seeds, options.output, options.typed)


def _baseline(options: argparse.Namespace) -> int:
    from grpo_ray.tools.course.playground.play import run_baseline

    run_baseline(options.samples, options.output, options.typed)
    return 0


def _frozen(options: argparse.Namespace) -> int:
    from grpo_ray.tools.course.playground.play import run_frozen

    run_frozen(options.output, options.typed)
    return 0
