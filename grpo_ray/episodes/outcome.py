"""Results of episodes: the status of an end, the user's outcome, and all that a trainer needs of an episode."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, pairwise

import numpy as np

from grpo_ray.episodes.segments import Segments
from grpo_ray.types import Episode, EpisodeSequence


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
    """Trained if no episode of the group has `turn_rewards`. Metrics, and the choice of checkpoints, show it
    in any case."""
    turn_rewards: tuple[float, ...] | None = None
    """One per turn, in the order of sampling. These are trained instead of `reward`, which should be their sum;
    an episode without any, in a group that has some, gets its `reward` in its last turn."""
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

    def episode(self, decode: Callable[[np.ndarray], str]) -> Episode:
        """Return the episode as a message to the Scorer.

        Args:
            decode: from the tokens `[response_tokens]` of one sequence to their text.
        """
        paths = self.segments.sequences()
        bounds = pairwise((0, *accumulate(len(path.response_token_ids) for path in paths)))
        empty = np.empty(0, np.int32)
        is_cut = self.status in (Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS, Status.TRUNCATED_TIME)
        return Episode(
            text="\n".join(decode(path.response_token_ids) for path in paths),
            token_ids=np.concatenate([empty, *(path.response_token_ids for path in paths)]),
            logprobs=np.concatenate([empty, *(path.logprobs for path in paths)]).astype(np.float32),
            versions=np.concatenate([empty, *(path.versions for path in paths)]),
            finish_reason="length" if is_cut else "stop",
            turns=np.concatenate([empty, *(path.turns for path in paths)]),
            sequences=tuple(
                EpisodeSequence(path.prompt_token_ids, *bound)
                for path, bound in zip(paths, bounds, strict=True)
            ),
            status=self.status.value,
            reward=self.reward,
            seconds=self.seconds,
            turn_rewards=self.turn_rewards,
            metrics=dict(self.metrics),
            error=self.error,
        )
