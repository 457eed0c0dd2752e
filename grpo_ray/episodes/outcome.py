"""Results of episodes: the status of an end, the user's outcome, and all that a trainer needs of an episode."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from grpo_ray.episodes.segments import Segments


class Status(StrEnum):
    """The reasons for which an episode can end."""

    FINISHED = "finished"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TIME = "truncated_time"
    ENVIRONMENT_ERROR = "environment_error"
    GENERATOR_ERROR = "generator_error"
    CANCELLED = "cancelled"


class EpisodeEnded(Exception):
    """The end of an episode by a limit or a failed Generator; later calls of its session raise it, too."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Outcome:
    """The rewards that an episode function returns instead of a plain number.

    Raises:
        ValueError: a reward is not a finite number.
    """

    reward: float
    turn_rewards: tuple[float, ...] | None = None  # one per turn, in the order of sampling
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for value in (self.reward, *(self.turn_rewards or ()), *self.metrics.values()):
            if isinstance(value, str | bytes) or not math.isfinite(value):
                raise ValueError(f"an episode returned {value!r}; rewards and metrics are finite numbers")


@dataclass(frozen=True)
class EpisodeResult:
    """One episode that has ended, in whatever way.

    `reward` is None if the end says nothing about the policy (an error, a cancellation, the clock): such an
    episode is left out of its group's baseline and has no advantage.
    """

    status: Status
    reward: float | None
    segments: Segments
    seconds: float
    turn_rewards: tuple[float, ...] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""  # the end of the traceback, or the limit that was reached
