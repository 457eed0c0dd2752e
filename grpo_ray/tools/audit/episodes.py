"""The audit of recorded episodes: turns, masks, branches and rewards, recomputed from the tokens.

Trusted are the tokens and the spans of turns; versions, counts and advantages must agree with them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from grpo_ray.config import Config
from grpo_ray.episodes.outcome import Status
from grpo_ray.objectives.returns import compare_episodes, rewards_per_turn
from grpo_ray.types import CONTEXT

Row = dict[str, Any]
LARGEST = 1e-3  # of a logprob: rounding may put a certain token's above 0
WITH_REWARD = (Status.FINISHED, Status.TRUNCATED_TURNS, Status.TRUNCATED_TOKENS)


def audit_episode(row: Row, may_be_masked: bool = False) -> Iterator[str]:
    """Yield the problems of one row; with `over_age: mask`, sampled tokens that are too old have no version."""
    versions, turns = _expanded(row["versions"], "version"), _expanded(row["turns"], "turn")
    num_tokens = len(row["token_ids"])
    if versions is None or turns is None or {len(versions), len(turns), len(row["logprobs"])} != {num_tokens}:
        yield "its logprobs, versions or turns do not cover its tokens"
        return
    yield from _audit_mask(row, versions, turns, may_be_masked)
    yield from _audit_turns(versions, turns)
    yield from _audit_sequences(row, turns)
    yield from _audit_counts(row, versions, turns)
    yield from _audit_end(row)


def _expanded(spans: Sequence[Row], name: str) -> np.ndarray | None:
    """Return the value of each token, `[response_tokens]`; None if the spans leave a gap or overlap."""
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends != sorted(set(ends)):
        return None
    return np.repeat([span[name] for span in spans], np.diff(ends)).astype(np.int64)


def _audit_mask(row: Row, versions: np.ndarray, turns: np.ndarray, may_be_masked: bool) -> Iterator[str]:
    """Check that a token either was sampled, with a turn, a version and a logprob, or has none of them."""
    logprobs = np.array(row["logprobs"], np.float64)  # nan for None
    is_sampled = turns != CONTEXT
    is_masked = is_sampled & (versions == CONTEXT) & may_be_masked
    for place in np.flatnonzero(is_masked & (logprobs != 0.0))[:1]:
        yield f"token {place} of turn {turns[place]} is masked, but has logprob {logprobs[place]}"
    for place in np.flatnonzero(is_sampled & ~is_masked & (versions < 0))[:1]:
        yield f"token {place} of turn {turns[place]} has version {versions[place]}"
    for place in np.flatnonzero(is_sampled & (~np.isfinite(logprobs) | (logprobs > LARGEST)))[:1]:
        yield f"token {place} of turn {turns[place]} has logprob {logprobs[place]}"
    for place in np.flatnonzero(~is_sampled & (versions != CONTEXT))[:1]:
        yield f"token {place} is context, but has version {versions[place]}"
    for place in np.flatnonzero(~is_sampled & (logprobs != 0.0))[:1]:
        yield f"token {place} is context, but has logprob {logprobs[place]}"


def _audit_turns(versions: np.ndarray, turns: np.ndarray) -> Iterator[str]:
    """Check that turns are numbered from 0 without gaps, each once and whole, with rising versions."""
    runs = [turn for turn, _ in groupby(turns.tolist()) if turn != CONTEXT]
    if sorted(set(runs)) != list(range(len(set(runs)))):
        yield f"its turns are {sorted(set(runs))}"
    if twice := sorted({turn for turn in runs if runs.count(turn) > 1}):
        yield f"turns {twice} have tokens at several places"
    for turn in sorted(set(runs)):
        sampled_by = versions[turns == turn]
        if np.any(np.diff(sampled_by) < 0):
            yield f"the versions of turn {turn} are {sampled_by.tolist()}"


class _Path(NamedTuple):
    """A trained sequence after its prompt."""

    token_ids: list[int]  # the prompt's, and the response's
    turns: list[int]  # of the response's sampled tokens, each once


def _audit_sequences(row: Row, turns: np.ndarray) -> Iterator[str]:
    """Check that the sequences split the tokens, and that each continues what it claims to."""
    bounds = [(sequence["start"], sequence["end"]) for sequence in row["sequences"]]
    edges = [0, *(end for _, end in bounds)]
    if [start for start, _ in bounds] != edges[:-1] or edges[-1] != len(turns) or edges != sorted(set(edges)):
        yield "its sequences do not have each token once"
        return
    paths: list[_Path] = []
    for number, sequence in enumerate(row["sequences"]):
        own = turns[sequence["start"] : sequence["end"]]
        path = _Path(
            [*sequence["prompt_token_ids"], *row["token_ids"][sequence["start"] : sequence["end"]]],
            [turn for turn, _ in groupby(own.tolist()) if turn != CONTEXT],
        )
        yield from (f"sequence {number}: {problem}" for problem in _audit_path(sequence, own, path, paths))
        if again := sorted(set(path.turns) & {turn for other in paths for turn in other.turns}):
            yield f"sequence {number}: turns {again} are in an earlier one too"
        paths.append(path)


def _audit_path(sequence: Row, turns: np.ndarray, path: _Path, earlier: Sequence[_Path]) -> Iterator[str]:
    """Check a sequence against the earlier ones of its episode."""
    if not sequence["prompt_token_ids"]:
        yield "it has no prompt"
    if CONTEXT in (turns[0], turns[-1]):
        yield "it begins or ends with context, which is not trained"
    if path.turns != sorted(path.turns):
        yield f"its turns are in the order {path.turns}, so that an earlier one continues a later one"
    if earlier and path.turns and earlier[-1].turns and path.turns[-1] < earlier[-1].turns[-1]:
        yield "its last turn is before that of the sequence before it"
    length = len(sequence["prompt_token_ids"])
    for number, other in enumerate(earlier):
        whole = len(other.token_ids)
        alike = [each for each in earlier if each.token_ids[:whole] == other.token_ids]
        # Two turns may have drawn the same tokens: then another sequence continues one of them.
        if whole <= length and path.token_ids[:whole] == other.token_ids and len(alike) == 1:
            yield f"it continues sequence {number} to its end, and is not a branch of it"


def num_masked(row: Row) -> int:
    """Return the number of sampled tokens that were too old to be trained; 0 for a plain completion."""
    versions, turns = (_expanded(row.get(key) or (), key[:-1]) for key in ("versions", "turns"))
    if versions is None or turns is None or len(versions) != len(turns):
        return 0
    return int(np.count_nonzero((turns != CONTEXT) & (versions == CONTEXT)))


def num_unrelated(row: Row) -> int:
    """Return the number of later sequences that begin with no token of an earlier one."""
    firsts = [sequence["prompt_token_ids"][:1] for sequence in row["sequences"]]
    return sum(first not in firsts[:number] for number, first in enumerate(firsts) if number)


def _audit_counts(row: Row, versions: np.ndarray, turns: np.ndarray) -> Iterator[str]:
    sampled, num_tokens = versions[versions != CONTEXT], int(np.count_nonzero(turns != CONTEXT))
    expected = {
        "num_tokens": num_tokens,
        "num_context_tokens": len(turns) - num_tokens,
        "num_turns": int(turns.max(initial=CONTEXT)) + 1,
        "num_branches": max(0, len(row["sequences"]) - 1),
        "min_version": int(sampled.min()) if len(sampled) else None,
        "max_version": int(sampled.max()) if len(sampled) else None,
    }
    for name, value in expected.items():
        if row[name] != value:
            yield f"{name} is recorded as {row[name]}, its tokens give {value}"


def _audit_end(row: Row) -> Iterator[str]:
    """Check the status against the rewards, and the rewards against the verdict."""
    status, reward, per_turn = row["status"], row["episode_reward"], row["turn_rewards"]
    if status not in tuple(Status):
        yield f"it has an unknown status, {status!r}"
    elif status != Status.ENVIRONMENT_ERROR and (reward is not None) != (status in WITH_REWARD):
        yield f"it ended as {status}, with reward {reward}"
    if per_turn is not None and len(per_turn) != row["num_turns"]:
        yield f"it has {len(per_turn)} turn_rewards for {row['num_turns']} turns"
    if not all(math.isfinite(value) for value in (reward or 0.0, *(per_turn or ()))):
        yield f"its rewards {reward}, {per_turn} are not finite"
    recorded = row["reward"], row["format_reward"], row["answer_reward"]
    earned = np.float32(reward or 0.0)
    expected = earned, float(status == Status.FINISHED), float(earned > 0)
    if recorded != expected:
        names = "reward, format_reward and answer_reward"
        given = tuple(float(value) for value in expected)
        yield f"{names} are recorded as {recorded}, the episode gives {given}"
    if (row["error"] is None) == (reward is None):
        yield f"its error is recorded as {row['error']!r}, its reward as {reward}"


def audit_comparison(members: Sequence[Row], config: Config) -> Iterator[str]:
    """Check a group's advantages against those that the recorded rewards give, and the rewards of errors."""
    for row in members:
        if row["status"] == Status.ENVIRONMENT_ERROR:
            reward = row["episode_reward"]
            if reward not in (None, config.episodes.error_reward):
                yield f"episode {row['sample']}: it ended as {row['status']}, with reward {reward}"
    formats, answers = (
        np.array([row[name] for row in members], np.float32) for name in ("format_reward", "answer_reward")
    )
    turns = [_expanded(row["turns"], "turn") for row in members]
    lengths = np.array([0 if own is None else np.count_nonzero(own != CONTEXT) for own in turns])
    per_turn: list[Sequence[float] | None] | None = None
    if any(row["turn_rewards"] is not None for row in members):
        per_turn = [
            rewards_per_turn(row["episode_reward"], row["turn_rewards"], row["num_turns"]) for row in members
        ]
    rewards, discount = [row["episode_reward"] for row in members], config.episodes.turn_discount
    expected, by_turn = compare_episodes(
        rewards, per_turn, config.algorithm, discount, formats, answers, lengths
    )
    recorded = np.array([row["advantage"] for row in members])
    if not np.allclose(recorded, expected, rtol=1e-5, atol=1e-5):
        yield f"advantages {recorded.tolist()} are recorded, its rewards give {expected.tolist()}"
    for number, row in enumerate(members):
        given, due = row["turn_advantages"], by_turn[number].tolist() if by_turn else None
        if not _is_close(given, due):
            yield f"episode {row['sample']}: turn_advantages are {given}, its rewards give {due}"


def _is_close(given: Sequence[float] | None, due: Sequence[float] | None) -> bool:
    if given is None or due is None:
        return given is due
    return len(given) == len(due) and np.allclose(given, due, rtol=1e-5, atol=1e-5)
