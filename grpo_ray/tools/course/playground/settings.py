"""What the sorting playground can be told. Nothing here imports torch: wrong arguments are refused at once."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from grpo_ray.config.algorithm import AdvantageKind
from grpo_ray.config.schema import describe
from grpo_ray.config.section import NonNegativeFloat, Section
from grpo_ray.errors import RunError

Deltas = Literal["rewards", "centered", "normalized", "max"]
Loss = Literal["naive", "unclipped", "clipped"]
Reward = Literal["inclusion_ordering", "distance"]

DELTAS: dict[Deltas, AdvantageKind] = {
    "rewards": "raw",
    "centered": "mean",
    "normalized": "mean_std",
    "max": "max_only",
}
# The values that a comparison tries of one setting; differences are against the first.
COMPARISONS: dict[str, tuple[str | float, ...]] = {
    "deltas": get_args(Deltas),
    "loss": get_args(Loss),
    "kl": (0.0, 0.1, 1.0),
}


class Settings(Section):
    """The defaults are the lecture's; its raw rewards are `deltas: rewards`."""

    deltas: Deltas = "centered"
    """what a reward is worth beside the others of its prompt"""
    loss: Loss = "naive"
    """naive: -log p * delta; unclipped: -ratio * delta; clipped: PPO's"""
    reward: Reward = "inclusion_ordering"
    """points for numbers and pairs in order, or for numbers in their place"""
    numbers: Annotated[int, Field(ge=2, le=5)] = 3  # a reward of every response is kept: 3 * 7^5 for five
    """numbers in a prompt, and in its response"""
    steps: PositiveInt = 100
    """batches of responses (the lecture's epochs)"""
    updates: PositiveInt = 10
    """gradient steps on each batch (the lecture's steps per epoch)"""
    responses: Annotated[int, Field(ge=2)] = 10
    """responses to each prompt in a batch"""
    dim: PositiveInt = 10
    """size of an embedding"""
    embedding_std: Annotated[float, Field(gt=0, le=100)] = 1.0
    """spread of the first embeddings; smaller: an untrained model that is less certain"""
    learning_rate: PositiveFloat = 1e-3
    """Adam's"""
    clip: PositiveFloat = 0.01
    """the clipped loss keeps the ratio within 1 - clip and 1 + clip"""
    kl: NonNegativeFloat = 0.0
    """weight of the penalty on a response's KL to the reference, per nat; 0 only measures"""
    reference_every: PositiveInt = 10
    """steps after which the policy is copied into the reference"""


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def allowed(name: str) -> str:
    """In words, such as `integer >= 1`."""
    field = Settings.model_fields[name]
    return describe(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def make_settings(given: Mapping[str, str], compare: str | None) -> Settings:
    """The settings with the given ones, as typed.

    Raises:
        RunError: a line for each that is not valid, and for one that `compare` is to vary.
    """
    wrong = []
    if compare is not None and compare in given:
        wrong.append(f"--compare {compare} tries every {option(compare)}; leave one of the two out")
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        for detail in error.errors():
            name = str(detail["loc"][0])
            wrong.append(f"{option(name)} {detail['input']} is not valid; allowed: {allowed(name)}")
    if wrong:
        raise RunError("\n".join(wrong))
    return settings
