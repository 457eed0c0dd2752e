"""The configuration of rewards: one by its name, a function of the user's, or a weighted sum of several."""

from typing import Annotated

from pydantic import AfterValidator, Field

from grpo_ray.config_section import Section

REWARD_NAMES = ("exact_match", "question_only", "r1_zero")


def _known(name: str) -> str:
    module, colon, function = name.partition(":")
    is_function = bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])
    if name not in REWARD_NAMES and not is_function:
        raise ValueError(
            f"{name!r} is not a reward; give one of {', '.join(REWARD_NAMES)}, or a function of your own as "
            "`module:function`"
        )
    return name


RewardName = Annotated[str, AfterValidator(_known)]


class RewardTerm(Section):
    """One term of a weighted sum."""

    reward: RewardName
    """A reward's name, or `module:function`."""
    weight: float = 1.0
    arguments: dict[str, float | str | bool] = {}
    """Further keyword arguments of the reward function."""


Reward = RewardName | Annotated[tuple[RewardTerm, ...], Field(min_length=1)]
