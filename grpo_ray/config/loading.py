"""Reading a configuration: YAML, then dotted overrides, then validation, with every problem in one message."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from grpo_ray.config import Config
from grpo_ray.config.schema import explained, nearest_name

BUNDLED = Path(__file__).parents[1] / "configs"


class ConfigError(ValueError):
    """An invalid configuration; the message has one line per problem."""


def find_config(path: str | Path) -> Path:
    """Return the bundled configuration that a bare name such as `quickstart` means, or the path as it is."""
    path = Path(path)
    names = {file.stem: file for file in BUNDLED.glob("*.yaml")}
    return names[str(path)] if str(path) in names and not path.is_file() else path


def load_config(path: str | Path, overrides: Sequence[str] = (), is_local: bool = False) -> Config:
    """Load a YAML file, or a bundled one by its name, and apply overrides such as `learner.learning_rate=1e-4`.

    An override's value is YAML: `a.b=null`, `model.tiny={}`, `sampling.stop=["</answer>"]`. If `is_local`, the
    torch engine is in place of vLLM.

    Raises:
        ConfigError: names all problems at once.
    """
    data = read_config(path := find_config(path), overrides)
    return make_config(data, with_torch(data, overrides) if is_local else overrides, path)


def read_config(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the mapping, not validated; a ConfigError names the faults of file and overrides together."""
    try:
        return _read_mapping(path)
    except ConfigError as error:
        raise ConfigError(_message(path, [str(error), *_apply_overrides({}, overrides)])) from None


def make_config(data: Mapping[str, Any], overrides: Sequence[str], source: str | Path) -> Config:
    """Validate a mapping after applying overrides; the message of a ConfigError begins with `source`."""
    changed = deepcopy(dict(data))
    problems = _apply_overrides(changed, overrides)
    try:
        config = Config.model_validate(changed)
    except ValidationError as error:
        # A default that is made of other fields is not made once one of them is wrong; no news about its field.
        found = [detail for detail in error.errors() if detail["input"] is not PydanticUndefined]
        problems += map(explained, found)
    if problems:
        raise ConfigError(_message(source, problems))
    return config


def overridden(data: Mapping[str, Any], overrides: Sequence[str], source: str | Path) -> dict[str, Any]:
    """Return a copy of the mapping with overrides applied, not validated; raises ConfigError."""
    changed = deepcopy(dict(data))
    if problems := _apply_overrides(changed, overrides):
        raise ConfigError(_message(source, problems))
    return changed


def with_torch(data: Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, ...]:
    """Put the torch engine in place of vLLM, unless an override names the engine."""
    sections = {name: data.get(name) for name in ("generator", "distillation")}
    engines = {k: v.get("engine", "vllm") if isinstance(v, dict) else "vllm" for k, v in sections.items()}
    return *(f"{name}.engine=torch" for name, engine in engines.items() if engine == "vllm"), *overrides


def _message(path: str | Path, problems: Sequence[str]) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return "\n  ".join([f"{path}: {count} in the configuration", *problems])


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses repeated keys: a second `learner:` section would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in lines:
                raise ConfigError(
                    f"line {line}: `{name}` was already given on line {lines[name]}; keep one of them"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def _read_mapping(path: Path) -> dict[str, Any]:
    if path.suffix in (".jsonl", ".parquet", ".csv"):
        raise ConfigError("this is a data file; give a .yaml file, and name this one as its task.train_path")
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"there is no such file; {_neighbours(path)}") from None
    except IsADirectoryError:
        raise ConfigError("this is a folder; give a .yaml file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"byte {error.start} is not UTF-8; save the file as UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from None
    data = _parse_yaml(text)
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}"
        raise ConfigError(f"the file {kind}; it must be a mapping of {', '.join(Config.model_fields)}")
    task: Any = data.get("task")
    for field in ("train_path", "validation_path") if isinstance(task, dict) else ():
        there = Path(str(task.get(field)))
        if there.parent.name == "given" and (here := path.parent / "given" / there.name).exists():
            task[field] = str(here.resolve())  # given from Python, in a folder that was moved or copied since
    return data


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not valid YAML: {error.problem}; check indentation and quotes") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # a month 13, for example
        raise ConfigError(f"not valid YAML: {error}; put text in quotes") from None


def _neighbours(path: Path) -> str:
    names = sorted(file.name for file in path.parent.glob("*.yaml"))
    bundled = sorted(file.stem for file in BUNDLED.glob("*.yaml")) if len(path.parts) == 1 else []
    nearest = nearest_name(path.name, [*names, *bundled])
    hint = f"did you mean {nearest}? " if nearest else ""
    here = f"{path.parent} has: {', '.join(names)}" if names else f"{path.parent} has no .yaml file"
    return f"{hint}{here}" + (f"; bundled, without .yaml: {', '.join(bundled)}" if bundled else "")


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Change `data` in place; return the problems."""
    problems = []
    for override in overrides:
        try:
            _apply_override(data, override)
        except ConfigError as error:
            problems.append(f"override `{override}`: {error}")
    return problems


def _apply_override(data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError("write it as section.key=value, for example learner.learning_rate=1e-4")
    section = data
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None:
            section[key] = {}
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(
                f"`{'.'.join(keys[:depth])}` is {section!r}, which has no keys; override it as a whole"
            )
    # In YAML `#` starts a comment, and `task.answer_marker=####` would silently become null.
    value = section[keys[-1]] = text.strip() if text.lstrip().startswith("#") else _parse_yaml(text)
    if isinstance(value, str) and re.search(r"\s#", text) and "#" not in value:
        raise ConfigError("` #` starts a comment in YAML; put the value in quotes")
