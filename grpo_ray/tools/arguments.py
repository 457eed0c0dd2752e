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
options, it takes the values of all of them. A field `typed: str` without a declaration receives the whole
command as typed, for messages that repeat it.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields
from functools import partial
from os import PathLike
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from grpo_ray.config.schema import nearest_name

T = TypeVar("T")
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
    """An option that takes a value; one of a field that is a bool takes none."""

    metavar: str | None
    help: str
    name: str | None = None
    """The option as typed, unless it is the field's name with dashes."""
    type: Callable[[str], Any] | None = None
    """The function that converts and checks the text, unless it is the field's type."""
    group: str = ""
    """The heading in the help. `EXCLUSIVE` has none; only one of its options may be given."""

    def typed(self, field: Field[Any]) -> str:
        return self.name or f"--{field.name.replace('_', '-')}"

    def add(self, target: argparse._ActionsContainer, field: Field[Any], kind: Any) -> None:
        kind, takes_many = _one_value(kind)
        if kind is bool:
            target.add_argument(self.typed(field), dest=field.name, action="store_true", help=self.help)
            return
        choices = get_args(kind) if get_origin(kind) is Literal else None
        is_required = field.default is MISSING
        default: Any = None if is_required else field.default
        target.add_argument(
            self.typed(field), dest=field.name, metavar=self.metavar, help=self.help,
            action="append" if takes_many else "store", type=self.type or (str if choices else kind),
            choices=choices, required=is_required, default=list(default or ()) if takes_many else default,
        )  # fmt: skip


Flag = partial(Option, None)


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


def make_options(options: type[Options], parsed: argparse.Namespace) -> Options:
    """Return the dataclass with the parsed values."""
    values = {name: getattr(parsed, name) for name in get_type_hints(options)}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return options(**given)


def converted(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of options that are given from Python, checked as typed ones are.

    Raises:
        ValueError: names the option.
    """
    found_in = _declarations(options)
    declared = {field.name: (kind, one) for field, kind, one in found_in if isinstance(one, Option)}
    found = dict(values)
    for name, value in values.items():
        if name not in declared:
            nearest = nearest_name(name, list(declared))
            raise ValueError(f"there is no option {name!r}{f'; did you mean {nearest!r}?' if nearest else ''}")
        kind, one = declared[name]
        if kind is bool and not isinstance(value, bool | None):
            raise ValueError(f"{name}: {value!r} is neither True nor False")
        if value is None or kind is bool:
            continue
        convert = one.type or _one_value(kind)[0]
        if convert is str and not isinstance(value, str | PathLike):
            raise ValueError(f"{name}: {value!r} is not text")
        try:
            found[name] = convert(str(value))
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def _declarations(options: type) -> Iterator[tuple[Field[Any], Any, Argument | Option]]:
    """Yield (field, type, declaration) per argument."""
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        if get_origin(hint := hints[field.name]) is Annotated:
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
    return [one.typed(field) for field, _, one in _declarations(options) if isinstance(one, Option)]


def _one_value(kind: Any) -> tuple[Any, bool]:
    """Return the type of one value, and True if the field holds any number of them."""
    if get_origin(kind) is tuple:
        return get_args(kind)[0], get_args(kind)[-1] is ...
    return (get_args(kind)[0] if type(None) in get_args(kind) else kind), False


def _number(kind: Callable[[str], T], is_good: Callable[[T], bool], words: str) -> Callable[[str], T]:
    """Return a converter of numbers that are `words`."""

    def convert(text: str) -> T:
        with suppress(ValueError):
            if is_good(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {words}")

    return convert


positive = _number(int, lambda value: value >= 1, "of at least 1")
natural = _number(int, lambda value: value >= 0, "of at least 0")
non_negative = _number(float, lambda value: 0 <= value < math.inf, "of at least 0")
vllm_temperature = _number(float, lambda t: t == 0 or 0.01 <= t <= 2, "of at least 0.01 and at most 2, or 0")
above_zero = _number(float, lambda value: 0 < value < math.inf, "above 0")
fraction = _number(float, lambda value: 0 < value <= 1, "above 0 and at most 1")
