"""The configuration of rewards (by name, a function of the user's, or a weighted sum) and of the Scorer."""

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    FiniteFloat,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    Tag,
)

from grpo_ray.config.secrets import SecretName
from grpo_ray.config.section import NonNegativeFloat, Section
from grpo_ray.config.user_code import is_function_name

REWARD_NAMES = (
    "brevity",
    "exact_match",
    "format",
    "graded",
    "keyword_inclusion",
    "question_only",
    "r1_zero",
    "sort_distance",
    "sort_inclusion_ordering",
)


def _known(name: str) -> str:
    if name not in REWARD_NAMES and not is_function_name(name):
        raise ValueError(
            f"{name!r} is not valid; allowed: {', '.join(REWARD_NAMES)}, or a function of your own as "
            "`module:function`"
        )
    return name


RewardName = Annotated[str, AfterValidator(_known)]


def _scalar(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError(f"{value!r} is not valid; allowed: number, text, or true or false")
    return value


Argument = Annotated[
    bool | int | float | str, PlainValidator(_scalar)
]  # a plain union reports one error per member


class RewardTerm(Section):
    """One term of a weighted sum."""

    reward: RewardName
    """Name of a reward, or `module:function`."""
    weight: float = 1.0
    """Factor of the term in the sum."""
    arguments: dict[str, Argument] = Field(default_factory=dict)
    """Extra keyword arguments for the reward function."""
    secrets: tuple[SecretName, ...] = ()
    """Environment variables that a function of yours needs, such as a judge's key, by their names."""


def _some_terms(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    if not terms:
        raise ValueError("an empty list rewards nothing; give at least one term, such as {reward: r1_zero}")
    return terms


def _form(value: Any) -> str | None:
    """Return the form that was meant, so that errors concern that form alone."""
    if isinstance(value, str):
        return "name"
    return "terms" if isinstance(value, list | tuple) else None


RewardTerms = Annotated[tuple[RewardTerm, ...], AfterValidator(_some_terms)]
Reward = Annotated[
    Annotated[RewardName, Tag("name")] | Annotated[RewardTerms, Tag("terms")],
    Discriminator(_form, custom_error_type="reward_form", custom_error_message="neither a name nor a list"),
    BeforeValidator(lambda value: [value] if isinstance(value, Mapping) else value),  # a sum of one term
]


def secrets_in(rewards: Iterable[Reward]) -> list[str]:
    """Return the names of the secrets that the rewards list, each once."""
    terms = [term for reward in rewards if not isinstance(reward, str) for term in reward]
    return list(dict.fromkeys(name for term in terms for name in term.secrets))


class ScorerConfig(Section):
    num_scorers: PositiveInt = 1
    """Scorer actors; each group goes to the least busy."""
    num_cpus: NonNegativeFloat = 0
    """CPUs that each Scorer reserves in Ray."""
    num_workers: PositiveInt = 4
    """Processes per Scorer that grade mathematics or run a function of yours; the other rewards need none."""
    timeout_s: PositiveFloat = 5.0
    """Seconds to grade one response; then its worker is killed, and the response counts as a wrong one."""
    memory_gib: PositiveFloat = 2.0
    """Memory to grade one response, in GiB (libraries excluded); with more, its worker is killed as well."""
    ungradable_reward: FiniteFloat | None = 0.0
    """Reward taken for a function of yours that exceeds these limits; null: an error, left out of its group."""
    readable_paths: tuple[str, ...] = ()
    """Files and folders that a function of yours reads while it grades; modules can be read anyway."""
