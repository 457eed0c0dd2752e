"""The settings of the sorting playground; this imports no torch, so wrong arguments are refused at once."""

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
# The values of a setting that a comparison tries; differences are to the first.
COMPARISONS: dict[str, tuple[str | float, ...]] = {
    "deltas": get_args(Deltas),
    "loss": get_args(Loss),
    "kl": (0.0, 0.1, 1.0),
}


class Settings(Section):
    """Settings of a training run; the defaults are the lecture's, with raw rewards (`deltas: rewards`)."""

    deltas: Deltas = "centered"
    """how deltas are computed from the rewards of a prompt's responses"""
    loss: Loss = "naive"
    """naive: -log p * delta; unclipped: -ratio * delta; clipped: PPO's"""
    reward: Reward = "inclusion_ordering"
    """points for included numbers and ordered pairs, or for numbers at the right position"""
    numbers: Annotated[int, Field(ge=2, le=5)] = 3  # every response's reward is stored: 3 * 7^5 for five
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
    """standard deviation of the initial embeddings; a smaller one makes the untrained model less certain"""
    learning_rate: PositiveFloat = 1e-3
    """learning rate of Adam"""
    clip: PositiveFloat = 0.01
    """the clipped loss clips the ratio to 1 - clip and 1 + clip"""
    kl: NonNegativeFloat = 0.0
    """weight of the penalty on a response's KL to the reference, per nat; 0 only measures it"""
    reference_every: PositiveInt = 10
    """the policy becomes the reference every N steps"""


def option(name: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{name.replace('_', '-')}"


def allowed(name: str) -> str:
    """Describe a setting's valid values, such as `integer >= 1`."""
    field = Settings.model_fields[name]
    return describe(Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation)


def make_settings(given: Mapping[str, str], compare: str | None) -> Settings:
    """Make the settings from those given as typed.

    Raises:
        RunError: a line for each that is not valid, or that `compare` varies.
    """
    wrong = []
    if compare is not None and compare in given:
        wrong.append(f"--compare {compare} tries all values of {option(compare)}; leave one of the two out")
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        for detail in error.errors():
            name = str(detail["loc"][0])
            wrong.append(f"{option(name)} {detail['input']} is not valid; allowed: {allowed(name)}")
    if wrong:
        raise RunError("\n".join(wrong))
    return settings
