"""A sweep: an experiment over every combination of the given values."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_ray.config.loading import ConfigError
from grpo_ray.tools.experiments.experiment import Experiment

METRICS = ("optim/grad_norm", "policy/entropy", "loss/clip_frac", "lag/mean")


def make_sweep(config: str, arguments: Sequence[str], name: str | None = None) -> Experiment:
    """Return the experiment for `KEY=V1,V2 KEY=V3,V4 KEY=V`; the last key varies fastest, V is common to all.

    Raises:
        ConfigError: no key is given, a key is given twice, or a key has no value.
    """
    axes = _axes(arguments)
    if name is not None and (name in ("", ".", "..") or Path(name).name != name):
        raise ConfigError(f"--name {name!r} is not a folder name; --output chooses where the folder goes")
    varied = {key: values for key, values in axes.items() if len(values) > 1} or axes
    common = tuple(f"{key}={values[0]}" for key, values in axes.items() if key not in varied)
    names = _short_names(list(varied))
    variants: dict[str, tuple[str, ...]] = {}
    for combination in itertools.product(*varied.values()):
        pairs = list(zip(varied, combination, strict=True))
        label = _folder_safe(",".join(f"{names[key]}={value}" for key, value in pairs))
        if label in variants:
            raise ConfigError(f"two combinations of values have the name {label!r}; give each value once")
        variants[label] = tuple(f"{key}={value}" for key, value in pairs)
    name = name or _folder_safe("-".join(["sweep", Path(config).stem, *names.values()]))
    return Experiment(name, f"{', '.join(varied)} of {config}", variants, METRICS, common)


def _axes(arguments: Sequence[str]) -> Mapping[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"{argument!r}: write it as section.key=value,value")
        if key in axes:
            raise ConfigError(f"{key} is given twice; give all its values at once, separated by commas")
        axes[key] = split_values(text)
        if not all(axes[key]):
            raise ConfigError(f"{argument!r}: a value is empty; write null or '' if that is meant")
    if not axes:
        raise ConfigError("a sweep needs at least one section.key=value,value")
    return axes


def split_values(text: str) -> list[str]:
    """Split at commas outside of brackets, braces and quotes."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            values.append("")
            continue
        values[-1] += character
    return [value.strip() for value in values]


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, or the whole key where two have the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def _folder_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
