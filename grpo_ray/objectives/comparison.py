"""The configured comparison of one group's responses: from rewards to advantages, ungraded ones left out."""

from collections.abc import Mapping

import numpy as np
import torch

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives.advantages import advantage_function, overlong_penalties
from grpo_ray.objectives.inputs import AdvantageInputs, arguments_of

NO_TERMS: Mapping[str, np.ndarray] = {}
NO_WEIGHTS: Mapping[str, float] = {}


def advantages_of(
    rewards: np.ndarray, lengths: np.ndarray, is_graded: np.ndarray, algorithm: AlgorithmConfig,
    max_tokens: int, format_rewards: np.ndarray | None = None, answer_rewards: np.ndarray | None = None,
    terms: Mapping[str, np.ndarray] = NO_TERMS, weights: Mapping[str, float] = NO_WEIGHTS,
) -> np.ndarray:  # fmt: skip
    """Return the advantages of a group of single turns, `[G]` float32.

    Overlong responses lose reward first, so a group of correct answers can still prefer the shorter ones.

    Args:
        rewards: `[G]`.
        lengths: `[G]`, in tokens.
        is_graded: `[G]` bool.
        format_rewards, answer_rewards: `[G]`; None: 0.
        terms: of a sum, `[G]` each, unweighted, by name; NaN where one does not apply.
        weights: of the terms.
    """
    shaped = shaped_rewards(rewards, lengths, algorithm, max_tokens)
    return compare_group(shaped, is_graded, algorithm, format_rewards, answer_rewards, lengths, terms, weights)


def shaped_rewards(
    rewards: np.ndarray, lengths: np.ndarray, algorithm: AlgorithmConfig, max_tokens: int
) -> np.ndarray:
    """Return the rewards `[G]` minus the penalties of overlong responses; see `advantages_of`."""
    penalties = overlong_penalties(
        torch.from_numpy(lengths), max_tokens, algorithm.overlong_buffer_tokens, algorithm.overlong_penalty
    )
    shaped: np.ndarray = rewards + penalties.numpy()
    return shaped


def compare_group(
    rewards: np.ndarray, is_graded: np.ndarray, algorithm: AlgorithmConfig,
    format_rewards: np.ndarray | None = None, answer_rewards: np.ndarray | None = None,
    lengths: np.ndarray | None = None, terms: Mapping[str, np.ndarray] = NO_TERMS,
    weights: Mapping[str, float] = NO_WEIGHTS,
) -> np.ndarray:  # fmt: skip
    """Return the configured advantages of a group's rewards as they are, `[G]` float32.

    Responses that were not graded, through no fault of theirs, get 0; the others are compared among themselves.
    Parts of the rewards that are not given are 0, and lengths 1.

    Raises:
        ValueError: a function of the user's own returns another shape than `[1, responses]`, or NaN.
    """
    is_graded = np.asarray(is_graded, bool)  # 0 and 1 would be indices
    advantages = np.zeros(len(rewards), np.float32)
    num_graded = int(np.count_nonzero(is_graded))
    kind = algorithm.advantage_kind
    if not num_graded or (kind == "leave_one_out" and num_graded == 1):  # there is no other to compare with
        return advantages
    parts = (rewards, format_rewards, answer_rewards)
    rows = [np.zeros(len(rewards)) if part is None else part for part in parts]
    rows.append(np.ones(len(rewards)) if lengths is None else lengths)
    columns = [torch.tensor(row[is_graded][None], dtype=torch.float32) for row in (*rows, *terms.values())]
    by_name = dict(zip(terms, columns[len(rows) :], strict=True))
    shaped, formats, answers, token_counts = columns[: len(rows)]
    inputs = AdvantageInputs(shaped, formats, answers, token_counts, by_name, weights)
    function = advantage_function(kind)
    fields = arguments_of(function, {"eps": algorithm.advantage_eps, "std": algorithm.std})
    found = function(inputs, **algorithm.advantage_options, **fields)
    if found.shape != inputs.rewards.shape:
        raise ValueError(
            f"algorithm.advantage: {kind} returned shape {tuple(found.shape)} for rewards of shape "
            f"{tuple(inputs.rewards.shape)}; return one advantage per reward"
        )
    if ":" in kind and not found.isfinite().all():
        values, given = found[0].tolist(), shaped[0].tolist()
        raise ValueError(f"algorithm.advantage: {kind} returned {values} for the rewards {given}")
    advantages[is_graded] = found[0].detach().numpy()
    return advantages


def spread(values: np.ndarray, algorithm: AlgorithmConfig) -> float:
    """Return the standard deviation of `[n]` values, `algorithm.std`; 0 if they are all the same, or none."""
    if not len(values) or values.min() == values.max():
        return 0.0
    return float(np.std(values.astype(np.float64), ddof=int(algorithm.std == "sample")))
