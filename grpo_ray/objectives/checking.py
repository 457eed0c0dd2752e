"""The check of advantages, losses and corrections before a run: they exist, take their options, and work."""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Any

import numpy as np
import torch

from grpo_ray.config import Config
from grpo_ray.config.algorithm import WEIGHING, AlgorithmConfig
from grpo_ray.config.user_code import check_arguments, keyword_parameters
from grpo_ray.objectives.advantages import advantage_function
from grpo_ray.objectives.comparison import advantages_of
from grpo_ray.objectives.correction import CORRECTIONS, correction_function
from grpo_ray.objectives.inputs import CorrectionInputs, takes_any, uses_ratio
from grpo_ray.objectives.logprobs import check_shape
from grpo_ray.objectives.losses import loss_function
from grpo_ray.objectives.objective import Objective
from grpo_ray.objectives.selection import SELECTIONS

ADVANTAGE_FIELDS = {"eps": "advantage_eps", "std": "std"}
LOSS_FIELDS = {name: name for name in ("cliprange", "cliprange_high", "dual_clip")}
CORRECTION_FIELDS = {"cap": "correction_cap", "band": "correction_band"}
# A small batch, on which the user's own functions are tried.
LOG_PROBS = ((-1.0, -2.0, -0.5), (-0.7, -3.0, 0.0))
MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGES = torch.tensor([[1.0], [-1.0]])


def check_algorithm(config: AlgorithmConfig, weights: Iterable[Mapping[str, float]] = ({},)) -> None:
    """Import the functions of the user's own, compare options with signatures, and call each on a small batch.

    Args:
        weights: of the terms of each reward, as an advantage is given them.

    Raises:
        ValueError: names the field, what is wrong with it, and how to fix it.
    """
    _check_fields("advantage_options", config.advantage_options, ADVANTAGE_FIELDS)
    _check_fields("loss_options", config.loss_options, LOSS_FIELDS)
    _check_fields("correction_options", config.correction_options, CORRECTION_FIELDS)
    _check_advantage(config, weights)
    _check_loss(config)
    _check_selection(config)
    taken: set[str] = set()
    for name in config.corrections:
        taken |= _check_correction(name, config)
    for key, field in CORRECTION_FIELDS.items():
        if key not in taken and field in config.limits:
            raise ValueError(f"algorithm.{field}: no correction in effect has a {key}; leave it out")
    taken -= CORRECTION_FIELDS.keys()
    if unknown := [key for key in config.correction_options if key not in taken]:
        names = ", ".join(sorted(taken)) or "none"
        raise ValueError(
            f"algorithm.correction_options: no correction in effect has an argument {unknown[0]!r}; "
            f"they take {names}"
        )


def notices_on_loss(config: Config) -> tuple[str, ...]:
    """Return a notice if the loss takes tokens of an older policy for the policy's own."""
    algorithm = config.algorithm
    if uses_ratio(loss_function(algorithm.loss)):
        return ()
    causes = {
        f"algorithm asks for {config.num_updates} updates per batch": config.num_updates > 1,
        f"weight_sync.max_lag is {config.weight_sync.max_lag}": config.weight_sync.max_lag > 0,
        f"buffer.replay.frac is {config.buffer.replay.frac:g}": config.replayed_per_step > 0,
    }
    found = [cause for cause, is_so in causes.items() if is_so]
    is_corrected = any(name in WEIGHING or name not in CORRECTIONS for name in algorithm.corrections)
    if not found or (is_corrected and config.num_updates == 1):
        return ()
    cure = "set weight_sync.max_lag to 0, or algorithm.off_policy_correction to `truncate_sequence`"
    if config.num_updates > 1:
        cure = "ask for one update, or choose a loss with a ratio such as `unclipped`"
    return (
        f"algorithm.loss: `{algorithm.loss}` has no ratio, so nothing corrects for tokens of an older policy "
        f"({'; '.join(found)}): {cure}",
    )


def acts_without_advantage(objective: Objective) -> bool:
    """Return True if the loss has a gradient also at tokens with advantage 0, tried on many of them.

    Such is a loss with a term of its own: a pull to the old policy (`kl_tau`), or supervision of some tokens.
    The rows have 1 to 8,192 tokens, log-probs down to -30, and log ratios from -5 to 5.
    """
    place = torch.arange(4 * 8192).view(4, 8192)
    policy = (-30 * (place * 0.75488 % 1) ** 3).requires_grad_()
    old = policy.detach() + 10 * (place * 0.56984 % 1) - 5
    mask = place % 8192 < torch.tensor([[1], [40], [700], [8192]])
    loss, _ = objective.policy_gradient_loss(policy, mask, torch.zeros(4, 1), old)
    if not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss[mask].sum(), policy, allow_unused=True)
    return gradient is not None and bool((gradient != 0).any())


def _check_advantage(config: AlgorithmConfig, weights: Iterable[Mapping[str, float]]) -> None:
    kind = config.advantage_kind
    what = f"algorithm.advantage: {kind}" + (" (of `no_baseline`)" if kind != config.advantage else "")
    parameters = keyword_parameters(advantage_function(kind), "inputs", what) or {}
    own = {name: p for name, p in parameters.items() if name not in ADVANTAGE_FIELDS}
    check_arguments(own, config.advantage_options, what, "give algorithm.advantage_options: {{}: ...}")
    k = config.advantage_options.get("k")
    if kind == "pass_at_k" and isinstance(k, int) and k >= config.samples_per_prompt:
        raise ValueError(
            f"algorithm.advantage_options: k is {k} and a group has {config.samples_per_prompt} responses "
            f"(algorithm.samples_per_prompt): only groups of more than k can differ; give at most "
            f"{config.samples_per_prompt - 1}, or raise algorithm.samples_per_prompt"
        )
    if ":" in kind:
        size = config.samples_per_prompt
        alone = np.ones(1)  # as if the grader had failed on the others
        for own_weights, rewards in product(weights, (np.arange(size) % 2, np.zeros(size), alone)):
            try:
                are_graded, lengths = np.ones(len(rewards), bool), np.arange(1, len(rewards) + 1)
                terms = dict.fromkeys(own_weights, rewards), own_weights
                advantages_of(rewards, lengths, are_graded, config, None, rewards, rewards, *terms)
            except Exception as error:  # the function is the user's: show whatever it raises
                raise ValueError(f"{what} fails on a small batch: {type(error).__name__}: {error}") from error


def _check_selection(config: AlgorithmConfig) -> None:
    if config.token_selection == "none":
        if config.selection_options:
            raise ValueError("algorithm.selection_options: token_selection is `none`, which takes none")
        return
    what = f"algorithm.token_selection: {config.token_selection}"
    positional = "log_probs, entropies, advantages, rng"
    parameters = keyword_parameters(SELECTIONS[config.token_selection], positional, what) or {}
    check_arguments(parameters, config.selection_options, what, "give algorithm.selection_options: {{}: ...}")
    options = {name: config.selection_options.get(name, p.default) for name, p in parameters.items()}
    if config.token_selection == "clip_cov" and options["low"] >= options["high"]:
        raise ValueError(f"{what}: low is {options['low']} and high {options['high']}; low must be the smaller")


def _check_loss(config: AlgorithmConfig) -> None:
    what = f"algorithm.loss: {config.loss}"
    function = loss_function(config.loss)
    parameters = keyword_parameters(function, "inputs", what) or {}
    own = {name: p for name, p in parameters.items() if name not in LOSS_FIELDS}
    check_arguments(own, config.loss_options, what, "give algorithm.loss_options: {{}: ...}")
    try:
        config.refuse_two_ratios(uses_ratio(function))
    except (ValueError, TypeError, NameError) as error:  # the last two if the annotations cannot be read
        raise ValueError(f"{what}: {error}") from None
    if ":" in config.loss:
        log_probs = torch.tensor(LOG_PROBS, requires_grad=True)
        try:
            objective = Objective.from_config(config)
            loss, found = objective.policy_gradient_loss(log_probs, MASK, ADVANTAGES, log_probs.detach() - 0.1)
            for name in found.keys() & {"clipped", "ratio"}:
                check_shape(name, found[name], log_probs)
            if found.get("clipped", MASK).dtype != torch.bool:
                raise TypeError("`clipped` must be bool")
            acts_without_advantage(objective)
            is_right = loss.requires_grad and bool(loss[MASK].isfinite().all())
        except Exception as error:  # the function is the user's: show whatever it raises
            raise ValueError(f"{what} fails on a small batch: {type(error).__name__}: {error}") from error
        if not is_right:
            raise ValueError(f"{what} must return finite losses that depend on inputs.policy_log_probs")


def _check_correction(name: str, config: AlgorithmConfig) -> set[str]:
    """Check one correction; return the names of its arguments."""
    what = f"algorithm.off_policy_correction: {name}"
    function = correction_function(name)
    parameters = keyword_parameters(function, "inputs", what) or {}
    own = {key: p for key, p in parameters.items() if key not in CORRECTION_FIELDS}
    options = {key: value for key, value in config.correction_options.items() if key in own}
    check_arguments(own, options, what, "give algorithm.correction_options: {{}: ...}")
    floor, cap = float(options.get("floor", 0.0)), config.correction_cap
    if floor > cap and ":" not in name:
        raise ValueError(f"{what}: floor is {floor:g}, above algorithm.correction_cap, which is {cap:g}")
    if ":" in name:
        behaviour = torch.tensor(LOG_PROBS)
        inputs = CorrectionInputs.of(behaviour + 0.1, behaviour, MASK, ADVANTAGES)
        own_only = config.model_copy(update={"off_policy_correction": name})
        try:
            weights, _ = Objective.from_config(own_only).correction_weights(inputs)
            is_right = weights.shape == MASK.shape and bool((weights.isfinite() & (weights >= 0)).all())
        except Exception as error:
            raise ValueError(f"{what} fails on a small batch: {type(error).__name__}: {error}") from error
        if not is_right:
            raise ValueError(f"{what} must return weights of at least 0 and a bool tensor, both [batch, seq]")
    return {*parameters, *(CORRECTION_FIELDS if takes_any(function) else ())}


def _check_fields(field: str, options: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    for name in options:
        if name in fields:
            raise ValueError(f"algorithm.{field}: {name} is a field of its own; set algorithm.{fields[name]}")
