"""Sampled episodes as the web page shows them: their turns, the branches between them, and how they ended."""

from collections.abc import Sequence

import numpy as np

from grpo_ray.telemetry.readable_rollouts import shortened
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
    return [
        {"prompt_token_ids": prompt, **{name: row[name][start:end] for name in ("token_ids", "logprobs")}}
        for prompt, start, end in bounds
        if start < MAX_EPISODE_TOKENS
    ]


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the values of an episode's tokens from those of its sequences."""
    return np.concatenate([np.empty(0, np.float32), *arrays])


def shown_episode(row: Row, texts: TokenTexts | None) -> Row:
    """Return what the page shows of an episode beside its tokens.

    A sequence begins in the conversation of an earlier one, `parent`, after its first `num_shared` tokens (of
    which the last sampled ones are of `turn`); the text of its prompt is of the tokens after these.
    """
    sequences = []
    for number, sequence in enumerate(row["sequences"]):
        parent, num_shared, turn = _parent(row, number)
        rest = sequence["prompt_token_ids"][num_shared:]
        cut = "… " if len(rest) > MAX_PROMPT_TOKENS else ""
        sequences.append({
            "start": sequence["start"], "end": sequence["end"], "parent": parent, "num_shared": num_shared,
            "turn": turn, "num_prompt_tokens": len(sequence["prompt_token_ids"]),
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


def _parent(row: Row, number: int) -> tuple[int | None, int, int | None]:
    """Return the earlier sequence that shares most tokens with a prompt, their number, and their last turn.

    None, 0 and None without one. A turn that is shared in part does not count.
    """
    prompt = row["sequences"][number]["prompt_token_ids"]
    best: tuple[int | None, int, int | None] = None, 0, None
    for earlier, other in enumerate(row["sequences"][:number]):
        path = [*other["prompt_token_ids"], *row["token_ids"][other["start"] : other["end"]]]
        num_shared = _num_shared(prompt, path)
        if num_shared > best[1]:
            best = earlier, num_shared, _last_turn(row, other, num_shared)
    return best


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common beginning."""
    length = min(len(first), len(second))
    differs = np.flatnonzero(np.array(first[:length]) != np.array(second[:length]))
    return int(differs[0]) if len(differs) else length


def _last_turn(row: Row, sequence: Row, num_shared: int) -> int | None:
    """Return the last turn in the first tokens of a sequence's path; None if they hold no whole turn."""
    end = sequence["start"] + num_shared - len(sequence["prompt_token_ids"])
    whole = [
        span["turn"]
        for span in row["turns"]
        if span["turn"] != CONTEXT and sequence["start"] <= span["start"] and span["end"] <= end
    ]
    return int(whole[-1]) if whole else None
