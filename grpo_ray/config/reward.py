"""The configuration of rewards (by name, a function of the user's, or a weighted sum) and of the Scorer."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, Tag

from grpo_ray.config.secrets import SecretName
from grpo_ray.config.section import NAME_OR_LIST, HomePath, NonNegativeFloat, PositiveSeconds, Section
from grpo_ray.config.user_code import Argument, one_of_or_own

REWARD_NAMES = (
    "brevity", "exact_match", "format", "graded", "keyword_inclusion", "last_number", "question_only",
    "r1_zero", "sort_distance", "sort_inclusion_ordering",
)  # fmt: skip

RewardName = Annotated[str, one_of_or_own(REWARD_NAMES)]


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w-]*", name, re.ASCII):
        raise ValueError(f"{name!r} is not valid; give letters, digits, `_` and `-`")
    return name


class RewardTerm(Section):
    """One term of a weighted sum."""

    reward: RewardName
    """Name of a reward, or `module:function`."""
    weight: float = 1.0
    """Factor of the term in the sum."""
    arguments: dict[str, Argument] = Field(default_factory=dict)
    """Extra keyword arguments for the reward function."""
    secrets: tuple[SecretName, ...] = ()
    """Environment variables that your function needs, by name, such as a judge's key."""
    name: Annotated[str, AfterValidator(_plain_name)] | None = None
    """Name of the term in metrics (`reward/<name>/mean`) and for `gdpo`; default: its function's name."""
    batched: bool = False
    """Call your function once per group, with lists instead of values; it returns a list."""
    network: bool = False
    """Let your function use the network, as an LLM judge does; it may be an `async def`."""
    timeout_s: PositiveSeconds = 60.0
    """Seconds for one call (`network` only)."""
    retries: NonNegativeInt = 2
    """Further calls after one that failed or timed out (`network` only)."""
    concurrency: PositiveInt = 32
    """Calls at the same time, per Scorer (`network` only)."""

    def _conflicts(self) -> Iterator[str]:
        for field in ("batched", "network"):
            if getattr(self, field) and ":" not in self.reward:
                yield f"{field}: {self.reward} is built in; only your own functions can be {field}"
        for field in ("timeout_s", "retries", "concurrency"):
            default = type(self).model_fields[field].default  # a run's config.yaml has every field
            if getattr(self, field) != default and not self.network:
                yield (
                    f"{field} applies only with `network: true`; other rewards use scorer.timeout_s and "
                    "scorer.num_workers. Omit it, or set network"
                )


def _some_terms(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    if not terms:
        raise ValueError("an empty list rewards nothing; give at least one term, such as {reward: r1_zero}")
    names = [term.name for term in terms if term.name is not None]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two terms have the name {repeated[0]!r}; give one of them another `name`")
    return terms


RewardTerms = Annotated[tuple[RewardTerm, ...], AfterValidator(_some_terms)]
Reward = Annotated[
    Annotated[RewardName, Tag("name")] | Annotated[RewardTerms, Tag("list")],
    NAME_OR_LIST,
    BeforeValidator(lambda value: [value] if isinstance(value, Mapping) else value),  # a sum of one term
]


def terms_of(reward: Reward) -> tuple[RewardTerm, ...]:
    """Return the terms of a reward; a name alone is one."""
    return (RewardTerm(reward=reward),) if isinstance(reward, str) else reward


def is_own(reward: Reward) -> bool:
    """Return True if a term of the reward is a function of the user's."""
    return any(":" in term.reward for term in terms_of(reward))


def named_terms(reward: Reward) -> tuple[RewardTerm, ...]:
    """Return the terms, each of a sum with a name.

    A second term of a function gets a number, unless it was given a name; a single reward may have none.
    """
    terms = terms_of(reward)
    if len(terms) == 1:
        return terms
    names = {term.name for term in terms if term.name is not None}
    named = []
    for term in terms:
        name = term.name
        if name is None:
            base = term.reward.rpartition(":")[2]
            name = next(n for n in chain([base], (f"{base}_{i}" for i in count(2))) if n not in names)
            names.add(name)
        named.append(term.model_copy(update={"name": name}))
    return tuple(named)


def term_weights(reward: Reward) -> dict[str, float]:
    """Return the weight of each term that has a name."""
    return {term.name: term.weight for term in named_terms(reward) if term.name is not None}


def secrets_in(rewards: Iterable[Reward]) -> list[str]:
    """Return the names of the secrets that the rewards list, each once."""
    terms = [term for reward in rewards for term in terms_of(reward)]
    return list(dict.fromkeys(name for term in terms for name in term.secrets))


class ScorerConfig(Section):
    num_scorers: PositiveInt = 1
    """Scorer actors; each group goes to the least busy."""
    num_cpus: NonNegativeFloat = 0
    """CPUs that each Scorer reserves in Ray."""
    num_workers: PositiveInt = 4
    """Processes per Scorer that grade mathematics or run your functions; other rewards need none."""
    timeout_s: PositiveSeconds = 5.0
    """Seconds for a term to grade one response; then its worker is killed, and the term counts it as wrong."""
    memory_gib: PositiveFloat = 2.0
    """Memory to grade one response, in GiB (libraries excluded); a worker that needs more is killed."""
    ungradable_reward: float | None = 0.0
    """Reward if your function exceeds these limits; null: an error, and the response leaves its group."""
    readable_paths: tuple[HomePath, ...] = ()
    """Files and folders that your function can read while it grades; it can read modules anyway."""
