"""The command line: `grpo-ray train CONFIG [section.key=value ...]`, `resume RUN`, `experiment NAME`, ...

`COMMANDS` lists what there is; a command's options and its function are in the module that it is imported from.
"""

import argparse
import errno
import logging
import os
import select
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from grpo_ray.config.loading import ConfigError
from grpo_ray.config.schema import key_meant, nearest_name
from grpo_ray.errors import INTERRUPTED, RunError
from grpo_ray.records.visible_text import visible
from grpo_ray.run.machine import let_waiting_threads_sleep
from grpo_ray.tools.arguments import Command, add_commands, flag_names, make_options, take_rest
from grpo_ray.tools.data import DATA
from grpo_ray.tools.experiments.command import EXPERIMENT, SWEEP
from grpo_ray.tools.export.command import EXPORT
from grpo_ray.tools.look import AUDIT, EVALUATE, REPORT, TOP
from grpo_ray.tools.planning.command import PLAN
from grpo_ray.tools.preflight.command import PREFLIGHT
from grpo_ray.tools.reward import REWARD
from grpo_ray.tools.simulation.command import SIMULATE
from grpo_ray.tools.submit.command import SUBMIT
from grpo_ray.tools.train import CHECK, RESUME, SFT, TRAIN

COMMANDS: tuple[Command[Any], ...] = (
    TRAIN, RESUME, SUBMIT, AUDIT, CHECK, PREFLIGHT, PLAN, SIMULATE, TOP, EXPERIMENT, SWEEP, EVALUATE, EXPORT,
    REPORT, REWARD, SFT, DATA,
)  # fmt: skip

UNUSABLE = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EISDIR,
    errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EEXIST, errno.EFBIG, errno.EMFILE, errno.EIO,
)  # fmt: skip


def main(
    arguments: Sequence[str] | None = None, commands: Sequence[Command[Any]] = COMMANDS,
    program: str = "grpo-ray",
) -> int:  # fmt: skip
    """Run a command; return the exit status."""
    set_library_defaults()
    sys.excepthook = print_traceback
    command, options = parse(sys.argv[1:] if arguments is None else arguments, commands, program)
    try:
        status = command.run(options)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        output = select.poll()
        output.register(1, 0)
        if not any(event & select.POLLERR for _, event in output.poll(0)):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader, such as `head`, has seen enough
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:
        hint = f"; all actors have been ended; {interrupt}" if str(interrupt) else ""
        print(visible(f"\ninterrupted{hint}"), file=sys.stderr)
        return INTERRUPTED
    except (RunError, ConfigError) as error:
        print(visible(f"{program}: {error}"), file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in UNUSABLE:
            raise
        place = error.filename or "a file, or standard output,"
        print(visible(f"{program}: {place} cannot be read or written: {error.strerror}"), file=sys.stderr)
        return 2


def parse(
    arguments: Sequence[str], commands: Sequence[Command[Any]] = COMMANDS, program: str = "grpo-ray"
) -> tuple[Command[Any], Any]:
    """Return the command and its options; a mistake ends the program, as in argparse."""
    parser = argparse.ArgumentParser(
        program, f"{program} COMMAND ...", "GRPO for language models on Ray and vLLM.",
        _commands_by_group(commands), formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_commands(parser, commands, "COMMAND", is_required=True)
    names = [command.name for command in commands]
    if not arguments:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    if not arguments[0].startswith("-") and arguments[0] not in names:
        nearest = nearest_name(arguments[0], names)
        hint = f"did you mean {nearest}?" if nearest else f"see {program} --help"
        parser.error(f"no command {arguments[0]!r}; {hint}")
    parsed, rest = parser.parse_known_args(arguments)
    has_option = any(argument.startswith("-") for argument in rest)
    if has_option or (rest and not take_rest(parsed.chosen.options, parsed, rest)):
        hint = _as_override(rest, arguments) if "overrides" in parsed else ""
        hint = hint or _flag_meant(rest, parsed.chosen)
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    parsed.typed = f"{program} {shlex.join(arguments)}"
    return parsed.chosen, make_options(parsed.chosen.options, parsed)


def _commands_by_group(commands: Sequence[Command[Any]]) -> str:
    groups: dict[str, list[str]] = {}
    for command in sorted(commands, key=lambda command: command.group == "More"):
        groups.setdefault(command.group, []).append(f"  {command.name:<12}{command.help}")
    sections = ["\n".join([f"{group}:", *lines]) for group, lines in groups.items()]
    return "\n\n".join([*sections, "grpo-ray COMMAND --help shows a command's options."])


def _as_override(rest: Sequence[str], arguments: Sequence[str]) -> str:
    """Return how to write the first option of `rest`, such as `--num_steps 2`; "" if it is like no key."""
    option = next(argument for argument in rest if argument.startswith("-"))
    name, _, value = option.lstrip("-").partition("=")
    following = arguments[arguments.index(option) + 1 :]
    key = key_meant(name.replace("-", "_"))
    return f"; write {key}={value or (*following, 'VALUE')[0]}, without dashes" if key else ""


def _flag_meant(rest: Sequence[str], command: Command[Any]) -> str:
    """Return the option that the first one of `rest` probably misspells, as a hint; "" if there is none."""
    first = next((argument for argument in rest if argument.startswith("--")), "")
    nearest = nearest_name(first.partition("=")[0], flag_names(command.options))
    return f"; did you mean {nearest}?" if nearest else ""


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error as Python would, except that a text quoted in it cannot act on the terminal."""
    print(visible("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def set_library_defaults() -> None:
    """Keep the notices of libraries from burying ours, and waiting threads from spinning."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # It says at every start on a CPU that a faster kernel could be fetched from a hub; its own one is fine.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # the actors' own output goes to the run's logs
    let_waiting_threads_sleep()
