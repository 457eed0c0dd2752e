"""The command `python -m examples.course playground`."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from examples.course.playground.settings import Settings, allowed, option
from grpo_ray.errors import RunError
from grpo_ray.tools.arguments import Command, Flag, Option, positive

SettingOption = partial(Option, "X", group="settings (the defaults are the lecture's)")


def _pair(name: str, text: str) -> tuple[str, str]:
    return name, text


SETTINGS = tuple(
    SettingOption(
        f"{field.description}: {allowed(name)} (default: {field.default})",
        name=option(name), type=partial(_pair, name),
    )
    for name, field in Settings.model_fields.items()
)  # fmt: skip


@dataclass(frozen=True)
class PlaygroundOptions:
    list: Annotated[bool, Flag("print the examples and exit")] = False


@dataclass(frozen=True)
class ExampleOptions:
    output: Annotated[str, Option("FOLDER", "folder for the results (default: %(default)s)")] = "playground"
    typed: str = ""


@dataclass(frozen=True)
class SortingOptions(ExampleOptions):
    compare: Annotated[
        Literal["deltas", "loss", "kl"] | None, Option(None, "compare all values of this setting")
    ] = None
    seeds: Annotated[int, Option("N", "runs per setting (default: %(default)s)", type=positive)] = 5
    given: Annotated[tuple[tuple[str, str], ...], SETTINGS] = ()
    """Settings and their texts, as typed."""


@dataclass(frozen=True)
class BaselineOptions(ExampleOptions):
    samples: Annotated[
        int, Option("N", "samples per estimate of the gradient (default: %(default)s)", type=positive)
    ] = 10


def _playground(options: PlaygroundOptions) -> int:
    if not options.list:
        raise RunError(f"name an example of the playground: {', '.join(command.name for command in EXAMPLES)}")
    for command in EXAMPLES:
        print(f"{command.name:<8}  {command.help}")
    return 0


def _sorting(options: SortingOptions) -> int:
    from examples.course.playground.play import run_sorting

    return run_sorting(dict(options.given), options.compare, options.seeds, options.output, options.typed)


def _baseline(options: BaselineOptions) -> int:
    from examples.course.playground.play import run_baseline

    run_baseline(options.samples, options.output, options.typed)
    return 0


def _frozen(options: ExampleOptions) -> int:
    from examples.course.playground.play import run_frozen

    run_frozen(options.output, options.typed)
    return 0


EXAMPLES = (
    Command("sorting", SortingOptions, _sorting, "train the lecture's small model to sort numbers"),
    Command(
        "baseline",
        BaselineOptions,
        _baseline,
        "show on two states how much noise a baseline removes from the gradient",
    ),
    Command(
        "frozen",
        ExampleOptions,
        _frozen,
        "compare the frozen ratio with one that is not, and with one of log-probabilities",
    ),
)
PLAYGROUND = Command(
    "playground", PlaygroundOptions, _playground, "run a lecture's small examples of policy gradients",
    "The examples of Stanford CS336's lecture on policy gradients; see docs/lab/playground.md.",
    subcommands=EXAMPLES, metavar="EXAMPLE",
)  # fmt: skip
