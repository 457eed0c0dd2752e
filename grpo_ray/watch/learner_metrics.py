"""The Learner's metrics of a step, from sums over its micro-batches."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from grpo_ray.objectives.correction import effective_sample_fraction

Sums = dict[str, float]


def add(sums: Sums, more: Mapping[str, float]) -> None:
    """Add `more` to `sums` in place; of names that end in `_min` or `_max` keep the smallest or largest."""
    for name, value in more.items():
        # numpy's functions keep a nan, Python's min and max would lose it.
        if name not in sums:
            sums[name] = value
        elif name.endswith("_min"):
            sums[name] = float(np.minimum(sums[name], value))
        elif name.endswith("_max"):
            sums[name] = float(np.maximum(sums[name], value))
        else:
            sums[name] += value


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the metrics of a step from its sums; those of which nothing was measured are absent."""
    got: Mapping[str, float] = defaultdict(float, sums)
    metrics: dict[str, float] = {}
    if ratios := got["num_ratios"]:
        clipped, low = got["num_clipped"], got["num_clipped_low"]
        metrics |= {
            "loss/clip_frac": clipped / ratios,
            "loss/clip_frac/low": low / ratios,
            "loss/clip_frac/high": (clipped - low) / ratios,
        }
    if plain := got["plain_gradient_sum"]:
        metrics |= {
            "loss/gradient_scale": got["gradient_sum"] / plain,
            # A clipped token has no gradient by right.
            "loss/untrained_frac": max(0.0, got["num_without_gradient"] - got["num_clipped"])
            / got["num_gradients"],
        }
    if compared := got["num_weights"]:
        metrics |= {
            "mismatch/kl": got["mismatch_kl"] / compared,
            "mismatch/logprob_diff/max": got["logprob_diff_max"],
            "mismatch/ess_frac": effective_sample_fraction(
                got["weight_sum"], got["weight_square_sum"], compared
            ),
        }
        metrics["mismatch/tokens_after_switch"] = got["num_after_switch"]
    if after_switch := got["num_after_switch"]:
        metrics["mismatch/kl/after_switch"] = got["after_switch_kl"] / after_switch
    if corrected := got["num_corrected"]:
        metrics |= {
            "correction/weight/mean": got["correction_weight_sum"] / corrected,
            "correction/weight/min": got["correction_weight_min"],
            "correction/weight/max": got["correction_weight_max"],
            "correction/limited_frac": got["num_limited"] / corrected,
            "correction/dropped_frac": got["num_dropped"] / corrected,
        }
    if computed := got["computed_tokens"]:
        metrics |= {
            "perf/prompt_frac": got["prompt_tokens"] / computed,
            "perf/padding_frac": got["padding_tokens"] / computed,
        }
    if tokens := got["entropy_tokens"]:
        metrics["policy/entropy/exact"] = got["entropy"] / tokens
    if "kl_k1_sum" in sums and (tokens := got["kl_tokens"]):
        metrics |= {"loss/kl_ref": got["kl_k1_sum"] / tokens, "loss/kl_ref_k3": got["kl_k3_sum"] / tokens}
    return metrics
