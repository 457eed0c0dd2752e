"""Functions of the user's own, named as `module:function`: importing them, and checking their arguments."""

import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, PlainValidator, TypeAdapter, ValidationError

from grpo_ray.errors import RunError


def is_function_name(name: str) -> bool:
    """Return True for text of the form `module:function`, where the module may have dots."""
    module, colon, function = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])


def one_of_or_own(names: tuple[str, ...]) -> AfterValidator:
    """Return the check of a name: one of `names`, or a function or class of the user's own."""

    def known(name: str) -> str:
        if name not in names and not is_function_name(name):
            allowed = f"{', '.join(names)}, or a function of your own as `module:function`"
            raise ValueError(f"{name!r} is not valid; allowed: {allowed}")
        return name

    return AfterValidator(known)


def _scalar(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-3 and 1.0e3 as text
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"{value!r:.200} is not valid; allowed: number, text, or true or false")
    return value


# A plain union would report one error per member.
Argument = Annotated[bool | int | float | str, PlainValidator(_scalar)]

IMPORTED: list[Path] = []
"""Folders that this process imports from, for the actors that it starts."""


def import_from(folder: Path) -> None:
    """Let this process, and those that it starts, import the modules in `folder` if it exists."""
    path = str(folder.resolve())
    if folder.is_dir() and path not in sys.path:
        sys.path.insert(0, path)
        IMPORTED.append(folder.resolve())
    importlib.invalidate_caches()  # an import may have noted that the folder is not there
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.parent in IMPORTED and not file.exists():  # of a run that was moved or removed
            del sys.modules[name]


def importable(name: str) -> str:
    """Return `module:function` for `folder/module.py:function`, with the folder on the path.

    Raises:
        RunError: there is no such file.
    """
    file, _, function = name.partition(":")
    if not file.endswith(".py"):
        return name
    if not Path(file).is_file():
        raise RunError(f"{file}: there is no such file; give FILE.py:FUNCTION")
    if not Path(file).stem.isidentifier():
        raise RunError(
            f"{file}: no module can have this name; rename the file, with letters, digits and `_` only"
        )
    sys.path.insert(0, str(Path(file).resolve().parent))
    return f"{Path(file).stem}:{function}"


def import_function(name: str, field: str) -> Callable[..., Any]:
    """Import the function named `module:function`; modules of the current folder are found too.

    Raises:
        ValueError: there is no such module or function, or the module fails.
    """
    module_name, _, function_name = name.partition(":")
    if module_name not in sys.modules and (folder := str(Path.cwd())) not in sys.path:
        sys.path.append(folder)  # not again for each use: the folder may be gone by then
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{field}: {module_name!r} imports {error.name!r}, which is not installed; install it"
            ) from error
        cure = "Start in the folder that holds it, or install it"
        if module_name.endswith(".py"):
            cure = f"Leave out .py: {module_name[:-3]}:{function_name}"
        raise ValueError(
            f"{field}: there is no module {module_name!r} in {Path.cwd()} or among the installed packages. "
            + cure
        ) from None
    except (Exception, SystemExit) as error:  # the module is the user's: show whatever it raises
        raise ValueError(
            f"{field}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    file = getattr(module, "__file__", None) or "none: it is a folder, or built in"
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if function is None:
        raise ValueError(f"{field}: {module_name!r} has no function {function_name!r}; its file is {file}")
    if not callable(function):
        raise ValueError(
            f"{field}: {function_name!r} of {module_name!r} is a {type(function).__name__}, not a function; "
            f"the file is {file}"
        )
    return function


def pickled(function: Callable[..., Any]) -> bytes:
    """Return the function as bytes, with all that it uses of a script or notebook, also if that has a cache."""
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, type(lru_cache(len))) and value.__module__ == "__main__":
                return _cached, (value.__wrapped__, value.cache_parameters())
            return super().reducer_override(value)

    Pickler(file := io.BytesIO()).dump(function)
    return file.getvalue()


def _cached(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return lru_cache(**parameters)(function)


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for an `async def`, and for an object with such a `__call__`."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def keyword_parameters(
    function: Callable[..., Any], positional: str, what: str
) -> dict[str, inspect.Parameter] | None:
    """Return the parameters after those passed by position; None for C code without a signature.

    Args:
        positional: the names of those, in the form `response, ground_truth`.
        what: begins the error: the field and the function's name.

    Raises:
        ValueError: the function does not take that many arguments by position.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None
    try:
        taken = signature.bind_partial(*positional.split(", ")).arguments
    except TypeError as error:
        raise ValueError(f"{what} must take ({positional}): {error}") from None
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return {
        key: parameter
        for key, parameter in signature.parameters.items()
        if key not in taken and parameter.kind not in by_position
    }


def check_arguments(
    parameters: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any], what: str, remedy: str
) -> None:
    """Compare keyword arguments with a function's `keyword_parameters`, by name and by annotation.

    Args:
        what: begins the errors: the field and the function's name.
        remedy: ends the error of a missing argument, with `{}` for its name.

    Raises:
        ValueError: an argument is unknown, missing, or of another type than its annotation.
    """
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {key: p for key, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for key, value in arguments.items():
        if key in known:
            _check_value(known[key].annotation, value, f"{what} has {key}={value!r:.200}")
        elif not takes_any:
            names = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"{what} has no argument {key!r}; {names}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in arguments]
    if missing:
        raise ValueError(f"{what} needs {', '.join(missing)}; {remedy.replace('{}', missing[0])}")


def _check_value(annotation: Any, value: Any, what: str) -> None:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):  # not annotated, or not evaluated
        return
    try:
        read = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{what}: {error.errors()[0]['msg'].lower()}") from None
    if isinstance(value, str) and isinstance(read, int | float):  # the function is given `value`
        raise ValueError(f"{what}, which is text; write it without quotes")
