"""Losses and corrections of one response in plain loops over its tokens: an independent, slow reference."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo_ray.config.algorithm import AlgorithmConfig

Logs = Sequence[float | None]  # log ratios policy / sampler, None where the sampler gave no finite logprob


def slow_weights(
    name: str, logs: Logs, advantages: Sequence[float], drift: Logs | None = None, *, cap: float = 2.0,
    floor: float = 0.0, band: tuple[float | None, float | None] | None = None, threshold: float = 1e-4,
    delta: float = math.nan,
) -> list[float]:  # fmt: skip
    """Return each token's factor under a correction; `drift` is log(sampler / current), default -logs."""
    known = [log for log in logs if log is not None]
    own_drift = [-log for log in known] if drift is None else [d for d in drift if d is not None]
    product = math.exp(sum(known))
    defaults = {"mask_band": (0.5, 5.0), "mask_product": (None, 3.0), "mask_geometric": (0.999, 1.001)}
    low, high = band or defaults.get(name, (None, None))

    def is_inside(value: float) -> bool:
        return (low is None or low <= value) and (high is None or value <= high)

    def is_kept(advantage: float) -> bool:
        if name == "mask_product":
            return is_inside(product)
        if name == "mask_geometric":
            return is_inside(math.exp(sum(known) / len(known)))
        if name == "veto":
            return all(math.exp(log) >= threshold for log in known)
        assert name == "opsm"
        return advantage >= 0 or sum(own_drift) / len(own_drift) <= delta

    weights = []
    for log, advantage in zip(logs, advantages, strict=True):
        if log is None:
            weights.append(0.0)
        elif name == "truncate_token":
            weights.append(min(max(math.exp(log), floor), cap))
        elif name == "truncate_sequence":
            weights.append(min(max(product, floor), cap))
        elif name == "mask_band":
            weights.append(math.exp(log) if is_inside(math.exp(log)) else 0.0)
        else:
            weights.append(float(is_kept(advantage)))
    return weights


def slow_product(
    algorithm: AlgorithmConfig, logs: Logs, advantages: Sequence[float], drift: Logs | None = None
) -> list[float]:
    """Return the product of the factors of all corrections in effect."""
    options: dict[str, Any] = dict(algorithm.correction_options)
    options |= {"cap": algorithm.correction_cap, "band": algorithm.correction_band}
    weights = [1.0] * len(logs)
    for name in algorithm.corrections:
        own = slow_weights(name, logs, advantages, drift, **options)
        weights = [a * b for a, b in zip(weights, own, strict=True)]
    return weights


def slow_loss(
    algorithm: AlgorithmConfig, new: Sequence[torch.Tensor], old: Sequence[float], advantages: Sequence[float],
    kept: Sequence[int],
) -> tuple[dict[int, Any], int]:  # fmt: skip
    """Return the loss of each kept token of one response, and how many of them a bound changes.

    Written from the papers, per token. Where a paper has one ratio per response, a token has its value and only
    its own gradient, so that advantages and factors may differ along the response.
    """
    name, options = algorithm.loss, dict(algorithm.loss_options)
    below, above = {
        "gspo": (3e-4, 4e-4), "luspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "gmpo": (0.4, 0.4)
    }.get(name, (0.2, 0.2))  # fmt: skip
    low = algorithm.cliprange or below
    high = algorithm.cliprange_high or algorithm.cliprange or above
    losses: dict[int, Any] = {}
    num_clipped = 0

    def constant(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=new[0].dtype)

    for t in kept:
        a = advantages[t]
        if name in ("no_baseline", "reinforce_with_baseline"):
            losses[t] = -a * new[t]
            continue
        ratio = torch.exp(new[t] - old[t])
        is_clipped = False
        if name == "unclipped":
            losses[t] = -ratio * a
        elif name == "cispo":
            weight = min(max(ratio.item(), 1 - low), 1 + high)
            is_clipped = weight != ratio.item()
            losses[t] = -weight * a * new[t]
        elif name in ("grpo_clip", "gspo", "luspo"):
            if name != "grpo_clip":  # GSPO-token, arXiv:2507.18071, Eq. 13-14
                of_response = math.exp(sum(new[u].item() - old[u] for u in kept) / len(kept))
                ratio = of_response * torch.exp(new[t]) / math.exp(new[t].item())
            bounded = min(max(ratio, constant(1 - low)), constant(1 + high))
            objective = min(ratio * a, bounded * a)
            is_clipped = bool(bounded * a < ratio * a)
            if algorithm.dual_clip is not None and a < 0:
                lowest = constant(algorithm.dual_clip * a)
                is_clipped = is_clipped or bool(objective < lowest)
                objective = max(objective, lowest)
            losses[t] = -objective
        elif name == "gmpo":
            logs = {}
            for u in kept:
                log = new[u] - old[u]
                logs[u] = min(log, constant(high)) if advantages[u] > 0 else max(log, constant(-low))
            is_clipped = bool(logs[t] != new[t] - old[t])
            of_response = math.exp(sum(log.item() for log in logs.values()) / len(kept))
            losses[t] = -of_response * torch.exp(logs[t]) / math.exp(logs[t].item()) * a
        elif name == "sapo":
            tau = options.get("tau", 1.0) if a > 0 else options.get("tau_negative", 1.05)
            losses[t] = -4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * a
        elif name == "vespo":
            product = math.exp(sum(new[u].item() - old[u] for u in kept))
            k = options.get("k", 2.0) if a >= 0 else options.get("k_negative", 3.0)
            decay = options.get("decay", 3.0) if a >= 0 else options.get("decay_negative", 2.0)
            losses[t] = -(product**k) * math.exp(decay - decay * product) * a * new[t]
        else:
            p, q = math.exp(old[t]), math.exp(new[t].item())
            delta = options.get("delta", {"dppo_tv": 0.15, "dppo_kl": 0.05, "ipo": 0.3}[name])
            change = q - p
            if name == "dppo_kl":
                change = math.copysign(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), q - p)
            is_clipped = change > options.get("delta_high", delta) if a > 0 else -change > delta
            if name == "ipo":
                is_clipped = abs(change) > delta
            losses[t] = 0.0 * new[t] if is_clipped else -min(q / p, options.get("cap", 20.0)) * a * new[t]
            losses[t] = losses[t] + options.get("kl_tau", 0.0) * (new[t] - old[t]) ** 2
        num_clipped += is_clipped
    return losses, num_clipped


def slow_kl(estimator: str, new: torch.Tensor, reference: float, old: float | None = None) -> torch.Tensor:
    """Return the KL estimate of one token; `old` is its old logprob, for `unbiased`."""
    difference = reference - new
    values = {"k1": -difference, "k2": difference**2 / 2, "k3": difference.exp() - difference - 1}
    if estimator.endswith("+"):
        return values[estimator[:-1]].detach() + values["k2"] - values["k2"].detach()
    if estimator == "unbiased":
        assert old is not None
        return torch.exp(new - old) * values["k3"]
    return values[estimator]


def slow_total(
    algorithm: AlgorithmConfig, losses: Sequence[Sequence[Any]], groups: Sequence[int], max_tokens: int
) -> Any:
    """Return the loss of a batch from its responses' token losses; `groups` are the responses' prompts."""
    num_tokens = sum(map(len, losses))
    total: Any = 0.0
    for own, group in zip(losses, groups, strict=True):
        of_prompt = sum(len(other) for other, place in zip(losses, groups, strict=True) if place == group)
        divisor = {
            "sequence_mean": len(own) * len(losses),
            "token_mean": num_tokens,
            "constant": len(losses) * max_tokens,
            "sequence_sum": len(losses),
            "prompt_mean": of_prompt * len(set(groups)),
        }[algorithm.loss_aggregation]
        total = total + (sum(own) / divisor if own else 0.0)
    return total
