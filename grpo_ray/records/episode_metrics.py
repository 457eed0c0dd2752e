"""Metrics of episodes: of a step's, of a validation's, and of those that an evaluation has on disk."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from grpo_ray.errors import counted
from grpo_ray.types import Completion, Episode, ScoredGroup


class Status(StrEnum):
    """The reasons for which an episode can end."""

    FINISHED = "finished"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TIME = "truncated_time"
    ENVIRONMENT_ERROR = "environment_error"
    GENERATOR_ERROR = "generator_error"
    CANCELLED = "cancelled"


CUT = (Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS)
THEN_RAISED = "; then it raised "  # in the error of an episode that was cut, before that of its function


@dataclass(frozen=True)
class EpisodeFacts:
    """One episode in numbers."""

    status: str
    num_turns: int
    num_branches: int  # times that a turn did not continue the tokens before it
    num_context_tokens: int  # tokens of the trained sequences that the policy did not sample, without prompts
    seconds: float
    metrics: Mapping[str, float]  # its own

    @classmethod
    def of(cls, episode: Episode) -> "EpisodeFacts":
        num_context = len(episode.token_ids) - episode.num_tokens
        num_branches = max(0, len(episode.sequences) - 1)
        return cls(
            episode.status, episode.num_turns, num_branches, num_context, episode.seconds, episode.metrics
        )

    @property
    def row(self) -> dict[str, Any]:
        """The columns of these names in a row of a file, in which metrics are pairs."""
        return {**vars(self), "metrics": list(self.metrics.items())}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "EpisodeFacts":
        """Read them from the columns of a `row`."""
        return cls(**{name: row[name] for name in cls.__dataclass_fields__} | {"metrics": dict(row["metrics"])})


def episodes_in(groups: Sequence[ScoredGroup]) -> Iterator[EpisodeFacts]:
    """Yield the facts of each episode; other completions are left out."""
    for group in groups:
        yield from (EpisodeFacts.of(c) for c in group.rollout.completions if isinstance(c, Episode))


def episode_metrics(episodes: Sequence[EpisodeFacts]) -> dict[str, float]:
    """Return the metrics by name; none without episodes."""
    if not episodes:
        return {}
    turns = [episode.num_turns for episode in episodes]
    seconds = [episode.seconds for episode in episodes]
    own: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            own.setdefault(name, []).append(value)
    return {
        "episodes/turns/mean": float(np.mean(turns)),
        "episodes/turns/max": float(max(turns)),
        "episodes/branches/mean": float(np.mean([episode.num_branches for episode in episodes])),
        "episodes/context_tokens/mean": float(np.mean([episode.num_context_tokens for episode in episodes])),
        "episodes/seconds/mean": float(np.mean(seconds)),
        "episodes/seconds/max": float(max(seconds)),
        **{f"episodes/status/{name}": share(episodes, name) for name in Status},
        **{f"episodes/metrics/{name}": float(np.mean(values)) for name, values in sorted(own.items())},
    }


def share(episodes: Sequence[EpisodeFacts], status: str) -> float:
    """Return the share of episodes that ended so."""
    return sum(episode.status == status for episode in episodes) / len(episodes)


def ending_line(completion: Completion) -> str:
    """Describe an episode on one line, `3 turns, 1 branch, finished`; other completions with an empty text."""
    if not isinstance(completion, Episode):
        return ""
    facts = EpisodeFacts.of(completion)
    parts = [counted(facts.num_turns, "turn"), facts.status]
    if facts.num_branches:
        parts.insert(1, counted(facts.num_branches, "branch", "es"))
    lines = [line for line in completion.error.splitlines() if line.strip()]
    return ", ".join(parts) + (f": {lines[-1].strip()}" if lines else "")
