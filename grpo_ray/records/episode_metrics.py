"""Metrics of episodes: of a step's, of a validation's, and of those that an evaluation has on disk."""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from grpo_ray.types import Episode, ScoredGroup


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
FACTS = ("status", "num_turns", "num_branches", "num_context_tokens", "seconds", "metrics")
"""The columns of `episode_facts`."""

Row = Mapping[str, Any]


def episode_facts(episode: Episode) -> dict[str, Any]:
    """Return an episode in numbers, as a row of a file has it: its own metrics are pairs."""
    return {
        "status": episode.status,
        "num_turns": episode.num_turns,
        # Times that a turn did not continue the tokens before it.
        "num_branches": max(0, len(episode.sequences) - 1),
        # Tokens of the trained sequences that the policy did not sample, without prompts.
        "num_context_tokens": len(episode.token_ids) - episode.num_tokens,
        "seconds": episode.seconds,
        "metrics": list(episode.metrics.items()),
    }


def facts_in(groups: Sequence[ScoredGroup]) -> list[Row]:
    """Return the facts of each episode; other completions are left out."""
    completions = (completion for group in groups for completion in group.rollout.completions)
    return [episode_facts(each) for each in completions if isinstance(each, Episode)]


def episode_metrics(episodes: Sequence[Row]) -> dict[str, float]:
    """Return the metrics of rows with episode facts, by name; none without episodes."""
    if not episodes:
        return {}
    turns, branches, context, seconds = (
        [row[name] for row in episodes]
        for name in ("num_turns", "num_branches", "num_context_tokens", "seconds")
    )
    own: dict[str, list[float]] = {}
    for row in episodes:
        for name, value in dict(row["metrics"]).items():
            own.setdefault(name, []).append(value)
    ends = Counter(row["status"] for row in episodes)
    return {
        "episodes/turns/mean": float(np.mean(turns)),
        "episodes/turns/max": float(max(turns)),
        "episodes/branches/mean": float(np.mean(branches)),
        "episodes/context_tokens/mean": float(np.mean(context)),
        "episodes/seconds/mean": float(np.mean(seconds)),
        "episodes/seconds/max": float(max(seconds)),
        **{f"episodes/status/{name}": ends[name] / len(episodes) for name in Status},
        **{f"episodes/metrics/{name}": float(np.mean(values)) for name, values in sorted(own.items())},
    }
