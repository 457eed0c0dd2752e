"""The definition of an experiment: finding one by name, or making one of every combination of some values."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic.dataclasses import dataclass

from grpo_ray.config.loading import ConfigError
from grpo_ray.config.schema import nearest_name
from grpo_ray.config.user_code import import_function, is_function_name

RUN_KEYS = ("run.name", "run.output_dir", "run.seed", "run.if_exists")  # set for each run
SWEEP_METRICS = ("optim/grad_norm", "policy/entropy", "loss/clip_frac", "lag/mean")


@dataclass(frozen=True)
class Experiment:
    """Variants of one job. The first is the baseline of the comparison."""

    name: str
    title: str
    variants: Mapping[str, tuple[str, ...]]  # label -> overrides
    metrics: tuple[str, ...]  # compared in addition to the validation reward
    common: tuple[str, ...] = ()  # overrides of every variant; a user's overrides come after them
    problem: int | None = None  # of the course handout
    draw: Callable[..., None] | None = None  # further figures: (results by variant, title, folder)

    @property
    def varied_keys(self) -> set[str]:
        return {key_of(override) for overrides in self.variants.values() for override in overrides}


def key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def find(name: str, experiments: Mapping[str, Experiment]) -> Experiment:
    """Return the experiment of that name, or the one that a `module:function` of the user's returns.

    Raises:
        ConfigError: there is none; suggests the nearest name.
        ValueError: as `import_function`.
    """
    if is_function_name(name):
        own = import_function(name, "NAME")()
        if not isinstance(own, Experiment):
            raise ConfigError(f"{name} returned a {type(own).__name__}; it must return an Experiment")
        return own
    if not name:
        raise ConfigError(f"give the name of an experiment: {', '.join(experiments)}")
    if name not in experiments:
        nearest = nearest_name(name, list(experiments))
        hint = f"did you mean {nearest}? " if nearest else ""
        raise ConfigError(f"{name!r} is not an experiment; {hint}choose from {', '.join(experiments)}")
    return experiments[name]


def check_overrides(experiment: Experiment, overrides: Sequence[str]) -> list[str]:
    """Return one line per problem with the overrides, both the user's and the experiment's."""
    problems = []
    for override in overrides:
        varied = sorted(other for other in experiment.varied_keys if _overlap(key_of(override), other))
        if varied:
            problems.append(f"override `{override}`: {', '.join(varied)} is what {experiment.name} varies")
    everything = {key_of(override) for override in (*overrides, *experiment.common)} | experiment.varied_keys
    for key in sorted(everything):
        if any(_overlap(key, other) for other in RUN_KEYS):
            problems.append(f"{key} is set for each run; see --seeds, --output and --name")
    return problems


def _overlap(key: str, other: str) -> bool:
    """Return whether the keys are equal or nested, such as `algorithm.kl` and `algorithm.kl.coefficient`."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


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
    last = [key.rpartition(".")[2] for key in varied]  # or the whole key where two have the same last part
    names = {key: name if last.count(name) == 1 else key for key, name in zip(varied, last, strict=True)}
    variants: dict[str, tuple[str, ...]] = {}
    for combination in itertools.product(*varied.values()):
        pairs = list(zip(varied, combination, strict=True))
        label = _folder_safe(",".join(f"{names[key]}={value}" for key, value in pairs))
        if label in variants:
            raise ConfigError(f"two combinations of values have the name {label!r}; give each value once")
        variants[label] = tuple(f"{key}={value}" for key, value in pairs)
    name = name or _folder_safe("-".join(["sweep", Path(config).stem, *names.values()]))
    return Experiment(name, f"{', '.join(varied)} of {config}", variants, SWEEP_METRICS, common)


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


def _folder_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)


EXPERIMENTS = {
    name: Experiment(name, **fields)
    for name, fields in yaml.safe_load(
        (Path(__file__).parent / "bundled.yaml").read_text(encoding="utf-8")
    ).items()
}
