"""The configured comparison of one group's responses: from rewards to advantages, ungraded ones left out."""

from collections.abc import Mapping

import numpy as np
import torch

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.objectives.advantages import advantage_function, overlong_penalties
from grpo_ray.objectives.inputs import AdvantageInputs, arguments_of


def advantages_of(
    rewards: np.ndarray, lengths: np.ndarray, is_graded: np.ndarray, algorithm: AlgorithmConfig,
    max_tokens: int | None, format_rewards: np.ndarray | None = None,
    answer_rewards: np.ndarray | None = None, terms: Mapping[str, np.ndarray] | None = None,
    weights: Mapping[str, float] | None = None,
) -> np.ndarray:  # fmt: skip
    """Return the configured advantages of a group, `[G]` float32.

    Overlong responses lose reward first, so a group of correct answers can still prefer the shorter ones.
    Responses that were not graded, through no fault of theirs, get 0; the others are compared among themselves.

    Args:
        rewards: `[G]`.
        lengths: `[G]`, in tokens.
        is_graded: `[G]` bool.
        max_tokens: of a response; None: none is overlong, as episodes are not.
        format_rewards, answer_rewards: `[G]`; None: 0.
        terms: of a sum, `[G]` each, unweighted, by name; NaN where one does not apply.
        weights: of the terms.

    Raises:
        ValueError: a function of the user's own returns another shape than `[1, responses]`, NaN or infinity.
    """
    is_graded = np.asarray(is_graded, bool)  # 0 and 1 would be indices
    advantages = np.zeros(len(rewards), np.float32)
    num_graded = int(np.count_nonzero(is_graded))
    kind = algorithm.advantage_kind
    if not num_graded or (kind == "leave_one_out" and num_graded == 1):  # there is no other to compare with
        return advantages
    if max_tokens is not None:
        rewards = shaped_rewards(rewards, lengths, algorithm, max_tokens)

    def graded(values: np.ndarray | None) -> torch.Tensor:
        values = np.zeros(len(rewards)) if values is None else values
        return torch.tensor(values[is_graded][None], dtype=torch.float32)

    inputs = AdvantageInputs(
        graded(rewards), graded(format_rewards), graded(answer_rewards), graded(lengths),
        {name: graded(values) for name, values in (terms or {}).items()}, weights or {},
    )  # fmt: skip
    function = advantage_function(kind)
    fields = arguments_of(function, {"eps": algorithm.advantage_eps, "std": algorithm.std})
    found = function(inputs, **algorithm.advantage_options, **fields)
    if found.shape != inputs.rewards.shape:
        raise ValueError(
            f"algorithm.advantage: {kind} returned shape {tuple(found.shape)} for rewards of shape "
            f"{tuple(inputs.rewards.shape)}; return one advantage per reward"
        )
    if ":" in kind and not found.isfinite().all():
        returned, given = found[0].tolist(), inputs.rewards[0].tolist()
        raise ValueError(f"algorithm.advantage: {kind} returned {returned} for the rewards {given}")
    advantages[is_graded] = found[0].detach().numpy()
    return advantages


def shaped_rewards(
    rewards: np.ndarray, lengths: np.ndarray, algorithm: AlgorithmConfig, max_tokens: int
) -> np.ndarray:
    """Return the rewards `[G]` minus the penalties of overlong responses."""
    buffer_tokens, penalty = algorithm.overlong_buffer_tokens, algorithm.overlong_penalty
    penalties = overlong_penalties(torch.from_numpy(lengths), max_tokens, buffer_tokens, penalty)
    shaped: np.ndarray = rewards + penalties.numpy()
    return shaped


def spread(values: np.ndarray, algorithm: AlgorithmConfig) -> float:
    """Return the standard deviation of `[n]` values, `algorithm.std`; 0 if they are all the same, or none."""
    if not len(values) or values.min() == values.max():
        return 0.0
    return float(np.std(values.astype(np.float64), ddof=int(algorithm.std == "sample")))
