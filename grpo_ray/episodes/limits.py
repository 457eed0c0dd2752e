"""The limits of an episode."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one episode; each has a status of its own (`Status`)."""

    max_turns: int = 32
    """Number of replies that may be sampled."""
    max_tokens: int = 4096
    """Tokens of a prompt and its reply together, at most the engine's `max_model_len`."""
    max_seconds: float = 600.0
    """Time of the episode, without the time in which no Generator served."""
    truncated_reward: float = 0.0
    """Reward after the end of turns or tokens, unless the episode function handles it and returns its own."""
    error_reward: float | None = None
    """Reward after an error of the environment; None: it says nothing about the policy."""
