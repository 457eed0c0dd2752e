"""Commands and their options, each declared once: an option is an annotated field of a command's dataclass.

    @dataclass(frozen=True)
    class ReportOptions:
        runs: Annotated[tuple[str, ...], Argument("RUN", "a run's directory; several are overlaid")]
        seed: Annotated[int, Option("N", "seed of the sample (default: %(default)s)")] = 0
        once: Annotated[bool, Flag("print one frame and exit")] = False

    REPORT = Command("report", ReportOptions, write_report, "write a web page of a run")

The field's name is the option's (`--log-ratio` for `log_ratio`), its type converts the text, and without a
default the option is required. A `tuple[T, ...]` takes any number of values; annotated with a tuple of
options, it takes the values of all of them. A field that holds a dataclass adds that dataclass's options.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

Options = TypeVar("Options")
EXCLUSIVE = "exclusive"


@dataclass(frozen=True)
class Argument:
    """A positional argument."""

    metavar: str
    help: str


@dataclass(frozen=True)
class Option:
    """An option that takes a value; with a `tuple[T, ...]` it may be given several times."""

    metavar: str | None
    help: str
    name: str | None = None
    """The option as typed, where the field's name is not it."""
    type: Callable[[str], Any] | None = None
    """Converts and checks the text, where the field's type does not."""
    group: str = ""
    """The heading in the help; of those in `EXCLUSIVE`, which has no heading, only one may be given."""


@dataclass(frozen=True)
class Flag:
    """An option without a value."""

    help: str


class TypedCommand:
    """Marks the field that receives the whole command as typed, for messages that repeat it."""


@dataclass(frozen=True)
class Command(Generic[Options]):
    """An entry of the command line, with the function that runs it and returns the exit status."""

    name: str
    options: type[Options]
    run: Callable[[Options], int]
    help: str
    description: str = ""
    """The first paragraph of `--help`; by default the short help as a sentence."""
    subcommands: "Sequence[Command[Any]]" = ()
    metavar: str = "COMMAND"
    """The placeholder of the subcommands."""


ConfigFile = Annotated[str, Argument("CONFIG", "a YAML file, such as configs/quickstart.yaml")]
Overrides = Annotated[tuple[str, ...], Argument("KEY=VALUE", "changes, such as learner.learning_rate=1e-4")]


def add_commands(
    parser: argparse.ArgumentParser, commands: Sequence[Command[Any]], metavar: str, is_required: bool
) -> None:
    """Add a subparser per command; parsing sets `chosen` to the command."""
    subparsers = parser.add_subparsers(required=is_required, metavar=metavar)
    for command in commands:
        sentence = f"{command.help[0].upper()}{command.help[1:]}."
        own = subparsers.add_parser(
            command.name, help=command.help, description=command.description or sentence
        )
        add_options(own, command.options)
        own.set_defaults(chosen=command)
        if command.subcommands:
            add_commands(own, command.subcommands, command.metavar, is_required=False)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add an argument per declared field of the dataclass."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for name, kind, declared, default in _declarations(options):
        group = declared.group if isinstance(declared, Option) else ""
        if group not in groups:
            is_exclusive = group == EXCLUSIVE
            groups[group] = (
                parser.add_mutually_exclusive_group() if is_exclusive else parser.add_argument_group(group)
            )
        _add(groups[group], name, kind, declared, default)


def make_options(options: type[Options], parsed: argparse.Namespace, typed: str) -> Options:
    """Return the dataclass with the parsed values; `typed` is the whole command."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        if is_dataclass(hint):
            values[name] = make_options(hint, parsed, typed)  # type: ignore[arg-type]
        elif TypedCommand in get_args(hint):
            values[name] = typed
        else:
            value = getattr(parsed, name)
            values[name] = tuple(value) if isinstance(value, list) else value
    return options(**values)


def _declarations(options: type) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (field, type, declaration, default) per argument, those of nested dataclasses included."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint = hints[field.name]
        if is_dataclass(hint):
            yield from _declarations(hint)  # type: ignore[arg-type]
        elif TypedCommand not in get_args(hint):
            kind, declared = get_args(hint)
            for one in declared if isinstance(declared, tuple) else (declared,):
                yield field.name, kind, one, field.default


def _add(target: argparse._ActionsContainer, name: str, kind: Any, declared: Any, default: Any) -> None:
    option = getattr(declared, "name", None) or f"--{name.replace('_', '-')}"
    is_repeated = get_origin(kind) is tuple and get_args(kind)[-1] is ...
    settings: dict[str, Any] = {"help": declared.help}
    if default is not MISSING:
        settings["default"] = default
    if isinstance(declared, Flag):
        target.add_argument(option, dest=name, action="store_true", **settings)
        return
    settings |= {"metavar": declared.metavar, **_conversion(kind, declared)}
    if isinstance(declared, Argument):
        if is_repeated:
            settings["nargs"] = "+" if default is MISSING else "*"
        elif default is not MISSING:
            settings["nargs"] = "?"
        target.add_argument(name, **settings)
        return
    if is_repeated:
        settings |= {"action": "append", "default": list(default)}
    target.add_argument(option, dest=name, required=default is MISSING, **settings)


def _conversion(kind: Any, declared: Argument | Option) -> dict[str, Any]:
    """Return argparse's `choices` or `type` for a field of this type."""
    if isinstance(declared, Option) and declared.type is not None:
        return {"type": declared.type}
    if get_origin(kind) in (tuple, None):
        item = get_args(kind)[0] if get_args(kind) else kind
        return {"type": item}
    members = [member for member in get_args(kind) if member is not type(None)]
    if get_origin(kind) is Literal:
        return {"choices": members}
    return _conversion(members[0], declared)  # `T | None`


def positive(text: str) -> int:
    """Convert a whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Convert a whole number of at least 0."""
    return _whole(text, 0)


def non_negative(text: str) -> float:
    """Convert a finite number of at least 0."""
    return _number(text, lambda value: 0 <= value < math.inf, "of at least 0")


def above_zero(text: str) -> float:
    """Convert a finite number above 0."""
    return _number(text, lambda value: 0 < value < math.inf, "above 0")


def fraction(text: str) -> float:
    """Convert a number above 0 and at most 1."""
    return _number(text, lambda value: 0 < value <= 1, "above 0 and at most 1")


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
    return int(text)


def _number(text: str, is_good: Callable[[float], bool], words: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")
    return value
