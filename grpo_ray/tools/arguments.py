"""Commands and their options, each declared once: an option is an annotated field of a command's dataclass.

A new command is a module like the following, and an entry in `cli.COMMANDS`:

    @dataclass(frozen=True)
    class ReportOptions:
        runs: Annotated[tuple[str, ...], Argument("RUN", "a run's directory; several are overlaid")]
        seed: Annotated[int, Option("N", "seed of the sample (default: %(default)s)")] = 0
        once: Annotated[bool, Flag("print one frame and exit")] = False

    REPORT = Command("report", ReportOptions, write_report, "write a web page of a run")

The field's name is the option's (`--log-ratio` for `log_ratio`), its type converts the text, and without a
default the option is required. A `tuple[T, ...]` takes any number of values; annotated with a tuple of
options, it takes the values of all of them.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from os import PathLike
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from grpo_ray.config.schema import nearest_name

Options = TypeVar("Options")
EXCLUSIVE = "exclusive"


@dataclass(frozen=True)
class Argument:
    """A positional argument."""

    metavar: str
    help: str

    def add(self, target: argparse._ActionsContainer, field: Field[Any], kind: Any) -> None:
        kind, takes_many = _one_value(kind)
        is_required = field.default is MISSING
        nargs = ("+" if is_required else "*") if takes_many else (None if is_required else "?")
        default = None if is_required else field.default
        target.add_argument(
            field.name, metavar=self.metavar, help=self.help, type=kind, nargs=nargs, default=default
        )


@dataclass(frozen=True)
class Option:
    """An option that takes a value."""

    metavar: str | None
    help: str
    name: str | None = None
    """The option as typed, unless it is the field's name with dashes."""
    type: Callable[[str], Any] | None = None
    """The function that converts and checks the text, unless it is the field's type."""
    group: str = ""
    """The heading in the help. `EXCLUSIVE` has none; only one of its options may be given."""

    def add(self, target: argparse._ActionsContainer, field: Field[Any], kind: Any) -> None:
        kind, takes_many = _one_value(kind)
        choices = get_args(kind) if get_origin(kind) is Literal else None
        is_required = field.default is MISSING
        default: Any = None if is_required else field.default
        target.add_argument(
            self.name or _dashed(field), dest=field.name, metavar=self.metavar, help=self.help,
            action="append" if takes_many else "store", type=self.type or (str if choices else kind),
            choices=choices, required=is_required, default=list(default or ()) if takes_many else default,
        )  # fmt: skip


@dataclass(frozen=True)
class Flag:
    """An option without a value."""

    help: str
    group: str = ""
    """The group, as of an `Option`."""

    def add(self, target: argparse._ActionsContainer, field: Field[Any], kind: Any) -> None:
        target.add_argument(_dashed(field), dest=field.name, action="store_true", help=self.help)


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
    group: str = "More"
    """The heading in the program's help."""


ConfigFile = Annotated[str, Argument("CONFIG", "a YAML file, or a bundled configuration such as quickstart")]
Local = Annotated[bool, Flag("run without Ray: all actors in this process, on its CPU, with the torch engine")]
Overrides = Annotated[tuple[str, ...], Argument("KEY=VALUE", "changes, such as learner.learning_rate=1e-4")]


def add_commands(
    parser: argparse.ArgumentParser, commands: Sequence[Command[Any]], metavar: str, is_required: bool
) -> None:
    """Add a subparser per command; parsing sets `chosen` to the command."""
    help = argparse.SUPPRESS if is_required else None  # the program's own help lists its commands in groups
    subparsers = parser.add_subparsers(required=is_required, metavar=metavar, help=help, prog=parser.prog)
    for command in commands:
        description = command.description or f"{command.help[0].upper()}{command.help[1:]}."
        own = subparsers.add_parser(command.name, help=command.help, description=description)
        own.set_defaults(chosen=command)
        groups: dict[str, argparse._ActionsContainer] = {"": own}
        for field, kind, declared in _declarations(command.options):
            group = "" if isinstance(declared, Argument) else declared.group
            if group == EXCLUSIVE and group not in groups:
                groups[group] = own.add_mutually_exclusive_group()
            elif group not in groups:
                groups[group] = own.add_argument_group(group)
            declared.add(groups[group], field, kind)
        if command.subcommands:
            add_commands(own, command.subcommands, command.metavar, is_required=False)


def make_options(options: type[Options], parsed: argparse.Namespace, typed: str) -> Options:
    """Return the dataclass with the parsed values; `typed` is the whole command."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        if TypedCommand in get_args(hint):
            values[name] = typed
        else:
            value = getattr(parsed, name)
            values[name] = tuple(value) if isinstance(value, list) else value
    return options(**values)


def converted(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of options that are given from Python, checked as typed ones are.

    Raises:
        ValueError: names the option.
    """
    found_in = _declarations(options)
    declared = {field.name: (kind, one) for field, kind, one in found_in if not isinstance(one, Argument)}
    found = dict(values)
    for name, value in values.items():
        if name not in declared:
            nearest = nearest_name(name, list(declared))
            raise ValueError(f"there is no option {name!r}{f'; did you mean {nearest!r}?' if nearest else ''}")
        kind, one = declared[name]
        if isinstance(one, Flag) and not isinstance(value, bool | None):
            raise ValueError(f"{name}: {value!r} is neither True nor False")
        if value is None or isinstance(one, Flag):
            continue
        convert = getattr(one, "type", None) or _one_value(kind)[0]
        if convert is str and not isinstance(value, str | PathLike):
            raise ValueError(f"{name}: {value!r} is not text")
        try:
            found[name] = convert(str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _declarations(options: type) -> Iterator[tuple[Field[Any], Any, Argument | Option | Flag]]:
    """Yield (field, type, declaration) per argument."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        hint = hints[field.name]
        if TypedCommand not in get_args(hint):
            kind, declared = get_args(hint)
            for one in declared if isinstance(declared, tuple) else (declared,):
                yield field, kind, one


def take_rest(options: type, parsed: argparse.Namespace, rest: Sequence[str]) -> bool:
    """Give the last positional argument what stands behind options; return False if it takes no more.

    argparse itself takes the values of positional arguments in one place only.
    """
    places = [(field.name, kind) for field, kind, one in _declarations(options) if isinstance(one, Argument)]
    name, takes_many = (places[-1][0], _one_value(places[-1][1])[1]) if places else ("", False)
    held = getattr(parsed, name, ())
    fits = takes_many or (held is None and len(rest) == 1)
    if fits:
        setattr(parsed, name, [*held, *rest] if takes_many else rest[0])
    return fits


def flag_names(options: type) -> list[str]:
    """Return the options as they are typed, without those that take their place among the arguments."""
    found = [(field, one) for field, _, one in _declarations(options) if not isinstance(one, Argument)]
    return [getattr(one, "name", None) or _dashed(field) for field, one in found]


def _one_value(kind: Any) -> tuple[Any, bool]:
    """Return the type of one value, and True if the field holds any number of them."""
    if get_origin(kind) is tuple:
        return get_args(kind)[0], get_args(kind)[-1] is ...
    return (get_args(kind)[0] if type(None) in get_args(kind) else kind), False


def _dashed(field: Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


def _whole(least: int) -> Callable[[str], int]:
    """Return a converter of whole numbers of at least `least`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least {least}")
        return int(text)

    return convert


def _number(is_good: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """Return a converter of numbers that are `words`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not is_good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")
        return value

    return convert


positive, natural = _whole(1), _whole(0)
non_negative = _number(lambda value: 0 <= value < math.inf, "of at least 0")
vllm_temperature = _number(lambda t: t == 0 or 0.01 <= t <= 2, "of at least 0.01 and at most 2, or 0")
above_zero = _number(lambda value: 0 < value < math.inf, "above 0")
fraction = _number(lambda value: 0 < value <= 1, "above 0 and at most 1")
