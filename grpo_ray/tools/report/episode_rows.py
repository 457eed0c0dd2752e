"""Sampled episodes as the web page shows them: their turns, the branches between them, and how they ended."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_ray.records.readable_rollouts import shortened
from grpo_ray.tools.report.rollout_sample import Row
from grpo_ray.tools.report.token_texts import TokenTexts
from grpo_ray.types import CONTEXT

MAX_EPISODE_TOKENS = 1000
MAX_PROMPT_TOKENS = 400  # of each sequence, its last ones
PLAIN = (
    "status", "num_turns", "num_branches", "num_context_tokens", "seconds", "turn_rewards", "turn_advantages",
)  # fmt: skip


def is_episode(row: Row) -> bool:
    """Return True if the row is an episode; files without any lack the column."""
    return row.get("status") is not None


def by_sequence(row: Row) -> list[Row]:
    """Return each sequence of an episode as a row of its own, up to the episode's last token that is shown."""
    bounds = [(each["prompt_token_ids"], each["start"], each["end"]) for each in row["sequences"]]
    turns = [span["turn"] for span in row["turns"] for _ in range(span["start"], span["end"])]
    values = {"token_ids": row["token_ids"], "logprobs": row["logprobs"], "turns": turns}
    return [
        {"prompt_token_ids": prompt, **{name: each[start:end] for name, each in values.items()}}
        for prompt, start, end in bounds
        if start < MAX_EPISODE_TOKENS
    ]


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values of an episode's tokens from those of its sequences."""
    return np.concatenate([np.empty(0, np.float32), *arrays])


def shown_episode(row: Row, texts: TokenTexts | None) -> Row:
    """Return what the page shows of an episode beside its tokens.

    The prompt of a branch shares its first `num_shared` tokens with the path of an earlier sequence, `parent`.
    `turn` is the last turn that they hold whole, and the branch's text and number of tokens are those after it.
    """
    sequences = []
    for number, sequence in enumerate(row["sequences"]):
        parent = _parent(row, number)
        rest = sequence["prompt_token_ids"][parent.end_of_turn :]
        cut = "… " if len(rest) > MAX_PROMPT_TOKENS else ""
        sequences.append({
            "start": sequence["start"], "end": sequence["end"], "parent": parent.sequence,
            "num_shared": parent.num_shared, "turn": parent.turn, "num_prompt_tokens": len(rest),
            "prompt": None if texts is None else cut + "".join(texts.of(rest[-MAX_PROMPT_TOKENS:])),
        })  # fmt: skip
    return {
        **{name: row[name] for name in PLAIN},
        "reward": row["episode_reward"],
        "metrics": dict(row["metrics"]),
        "error": shortened(row["episode_error"] or ""),
        "turns": [[span["turn"], span["start"]] for span in row["turns"]],
        "sequences": sequences,
        "num_tokens": len(row["token_ids"]),
    }


class _Parent(NamedTuple):
    """The earlier sequence that shares most tokens with a prompt."""

    sequence: int | None = None
    num_shared: int = 0
    turn: int | None = None  # the last one that is shared whole
    end_of_turn: int = 0  # number of the prompt's tokens up to it


def _parent(row: Row, number: int) -> _Parent:
    prompt = row["sequences"][number]["prompt_token_ids"]
    best = _Parent()
    for earlier, other in enumerate(row["sequences"][:number]):
        path = [*other["prompt_token_ids"], *row["token_ids"][other["start"] : other["end"]]]
        num_shared = _num_shared(prompt, path)
        if num_shared > best.num_shared:
            best = _Parent(earlier, num_shared, *_last_turn(row, other, num_shared))
    return best


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(np.array(first[:length]) != np.array(second[:length]))
    return int(differs[0]) if len(differs) else length


def _last_turn(row: Row, sequence: Row, num_shared: int) -> tuple[int | None, int]:
    """Return the last whole turn among the first tokens of a sequence's path, and its end there."""
    before = len(sequence["prompt_token_ids"]) - sequence["start"]
    whole = [
        (int(span["turn"]), int(span["end"]) + before)
        for span in row["turns"]
        if span["turn"] != CONTEXT and span["start"] >= sequence["start"] and span["end"] + before <= num_shared
    ]
    return whole[-1] if whole else (None, 0)
