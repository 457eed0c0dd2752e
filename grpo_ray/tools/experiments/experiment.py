"""The definition of an experiment, and finding one by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from grpo_ray.config.loading import ConfigError
from grpo_ray.config.schema import nearest_name
from grpo_ray.config.user_code import import_function, is_function_name

RUN_KEYS = ("run.name", "run.output_dir", "run.seed", "run.if_exists")  # set for each run


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "variants", MappingProxyType(dict(self.variants)))

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
        own: Experiment = import_function(name, "NAME")()
        return own
    if not name:
        raise ConfigError(f"give the name of an experiment: {', '.join(experiments)}")
    if name not in experiments:
        nearest = nearest_name(name, list(experiments))
        hint = f"did you mean {nearest}? " if nearest else ""
        raise ConfigError(f"{name!r} is not an experiment; {hint}there are: {', '.join(experiments)}")
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
            problems.append(f"{key}: it is set for each run; see --seeds, --output and --name")
    return problems


def _overlap(key: str, other: str) -> bool:
    """Return whether the keys are equal or nested, such as `algorithm.kl` and `algorithm.kl.coefficient`."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
