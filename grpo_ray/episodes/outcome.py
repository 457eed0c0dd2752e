"""Results of episodes: the status of an end, the user's outcome, and all that a trainer needs."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from grpo_ray.episodes.segments import Segments
from grpo_ray.records.episode_metrics import CUT
from grpo_ray.records.episode_metrics import Status as Status
from grpo_ray.records.visible_text import encodable
from grpo_ray.rewards.isolation.messages import LARGEST_REWARD
from grpo_ray.types import Episode, EpisodeSequence

MAX_METRICS, LONGEST_NAME = 64, 100  # metrics of an episode, characters of the name of one
LARGEST_METRIC = 1e30  # a sum of as many as a step has stays finite


class EpisodeEnded(Exception):
    """The end of an episode by a limit or a failed Generator; later calls of its session raise it, too."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Outcome:
    """The rewards that an episode function returns instead of a plain number; numbers become floats.

    Raises:
        ValueError: a reward or a metric is not a finite number within its bound, `turn_rewards` is no sequence,
            `metrics` no mapping or one of more than MAX_METRICS, or a name no text of at most LONGEST_NAME
            characters.
    """

    reward: float
    """Trained if no episode of the group has `turn_rewards`. Metrics and best checkpoint always go by it."""
    turn_rewards: tuple[float, ...] | None = None
    """One per turn, in the order of sampling. These are trained instead of `reward`, which should be their sum;
    an episode without any, in a group that has some, gets its `reward` in its last turn."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        per_turn = self.turn_rewards
        if per_turn is not None:
            try:
                listed = None if isinstance(per_turn, Mapping | Set | str | bytes) else list(per_turn)
            except TypeError:  # a single number, also of NumPy or torch
                listed = None
            if listed is None:
                raise ValueError(
                    f"an episode returned {_shown(per_turn)} as turn_rewards; list a number per turn"
                )
            per_turn = tuple(_number(value, "a reward of a turn", LARGEST_REWARD) for value in listed)
        reward = _number(self.reward, "its reward", LARGEST_REWARD)
        vars(self).update(reward=reward, turn_rewards=per_turn, metrics=_checked_metrics(self.metrics))


def _checked_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise ValueError(f"an episode returned {_shown(metrics)} as metrics; return a dict of numbers by name")
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"an episode returned {len(metrics)} metrics; return at most {MAX_METRICS}")
    checked = {}
    for name, value in metrics.items():
        known = encodable(name) if isinstance(name, str) else ""
        if not 0 < len(known) <= LONGEST_NAME:
            raise ValueError(
                f"an episode returned a metric named {_shown(name)}; a name is text of 1 to {LONGEST_NAME} "
                "characters"
            )
        checked[known] = _number(value, f"the metric {known!r}", LARGEST_METRIC)
    return checked


def _number(value: object, what: str, largest: float) -> float:
    """Return the number as a float: of Python, NumPy or torch."""
    try:
        number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)  # type: ignore[arg-type]
    except Exception:
        number = math.nan
    if not abs(number) <= largest:  # nor for NaN
        raise ValueError(
            f"an episode returned {_shown(value)} as {what}; return a finite number within +-{largest:g}, "
            "or an Outcome of such numbers"
        )
    return number


def _shown(value: object) -> str:
    try:
        return repr(value)[:100]
    except Exception:  # for example of an integer with too many digits
        return f"a value of type {type(value).__name__}"


def episode_of(
    segments: Segments, decode: Callable[[np.ndarray], str], status: Status, outcome: Outcome | None,
    seconds: float, error: str = "",
) -> Episode:  # fmt: skip
    """Return an episode that has ended, in whatever way, as a message to the Scorer.

    Args:
        decode: from the tokens `[response_tokens]` of one sequence to their text.
        outcome: None if the end says nothing about the policy (an error, a cancellation, the clock): such an
            episode is left out of its group's baseline and has no advantage.
        error: the end of the traceback, or the limit that was reached.
    """
    paths = segments.sequences()
    bounds = pairwise((0, *accumulate(len(path.response_token_ids) for path in paths)))
    empty = np.empty(0, np.int32)
    earned: dict[str, Any] = {"reward": None} if outcome is None else vars(outcome)
    return Episode(
        text="\n".join(decode(path.response_token_ids) for path in paths),
        token_ids=np.concatenate([empty, *(path.response_token_ids for path in paths)]),
        logprobs=np.concatenate([empty, *(path.logprobs for path in paths)]).astype(np.float32),
        versions=np.concatenate([empty, *(path.versions for path in paths)]),
        finish_reason="length" if status in (*CUT, Status.TRUNCATED_TIME) else "stop",
        turns=np.concatenate([empty, *(path.turns for path in paths)]),
        sequences=tuple(
            EpisodeSequence(path.prompt_token_ids, *bound) for path, bound in zip(paths, bounds, strict=True)
        ),
        status=status.value,
        seconds=seconds,
        error=encodable(error),
        **earned,
    )
