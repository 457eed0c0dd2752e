"""The charts of the web page: which metrics share one, and their unit."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from grpo_ray.watch.metrics_catalog import IMBALANCE, SLOWEST, by_number


@dataclass(frozen=True)
class Panel:
    """One chart over steps; `series` are (metric, label) pairs, drawn as in `metrics.jsonl`.

    A `*` in a metric stands for what the run has there, such as the number of each rank, also in the label.
    """

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    is_share: bool = False  # drawn from 0 to 1, unless a value is outside
    bands: bool = False  # drawn for the series that have standard errors
    is_number: bool = False  # numbers of ranks: drawn as dots from 0, as nothing lies between two of them
    scale: float = 1.0  # number of the metric's units in one of `unit`


GIB = 2.0**30
RANKS = "Ranks"  # the section of the Learner's ranks, if there are several
REWARD, VALIDATION = "reward/mean", "eval/reward"  # the series with standard errors

PANELS: dict[str, tuple[Panel, ...]] = {
    "Reward": (
        Panel("Training reward", "mean over a step's responses", ((REWARD, "training"),), True, True),
        Panel("Validation reward", "mean", ((VALIDATION, "validation"),), True, True),
        Panel("Format and answer", "share", (("reward/format", "format"), ("reward/answer", "answer")), True),
    ),
    "Lag and staleness": (
        Panel("Age of trained tokens", "versions", (("lag/mean", "mean"), ("lag/max", "max"))),
        Panel("Age of trained tokens in updates", "updates", (("lag/updates/max", "max"),)),
        Panel("Groups waiting and refused", "groups",
              (("buffer/groups", "waiting in the buffer"), ("lag/rejected", "refused as too old"))),
    ),
    "KL and entropy": (
        Panel("Entropy", "nats per token", (("policy/entropy", "entropy"),)),
        Panel("KL divergence", "nats per token",
              (("mismatch/kl", "sampler to Learner"), ("loss/kl_ref_k3", "policy to reference"))),
        Panel("Clipped tokens", "share", (("loss/clip_frac", "clipped"),)),
    ),
    "Response length": (
        Panel("Response tokens", "tokens",
              (("rollout/response_tokens/mean", "mean"), ("rollout/response_tokens/max", "max"))),
        Panel("Truncated responses", "share", (("rollout/truncated_frac", "truncated"),), True),
    ),
    "Episodes": (
        Panel("Turns", "turns", (("episodes/turns/mean", "mean"), ("episodes/turns/max", "max"))),
        Panel("How episodes ended", "share",
              (("episodes/status/finished", "finished"), ("episodes/status/truncated_turns", "out of turns"),
               ("episodes/status/truncated_tokens", "out of tokens"),
               ("episodes/status/truncated_time", "out of time"),
               ("episodes/status/environment_error", "environment error")), True),
        Panel("Time per episode", "s", (("episodes/seconds/mean", "mean"), ("episodes/seconds/max", "max"))),
        Panel("Context", "tokens per episode", (("episodes/context_tokens/mean", "not sampled"),)),
        Panel("Branches", "per episode", (("episodes/branches/mean", "mean"),)),
        Panel("Metrics of the episodes", "mean", (("episodes/metrics/*", "*"),)),
    ),
    "Throughput": (
        Panel("Tokens per second", "tokens/s",
              (("throughput/sampled_tokens_per_s", "sampled"), ("throughput/trained_tokens_per_s", "trained"))),
        Panel("Utilization", "share",
              (("utilization/learner", "Learner"), ("utilization/generators", "Generators")), True),
        Panel("Model FLOPs utilization", "share of the peak", (("perf/mfu", "Learner"),), True),
        Panel("Training rate", "tokens/s per device", (("perf/tokens_per_s_per_device", "trained"),)),
        Panel("Computed tokens", "share",
              (("perf/prompt_frac", "prompts"), ("perf/padding_frac", "padding")), True),
        Panel("Peak memory of the Learner's GPU", "GiB",
              (("memory/learner_device_peak_bytes", "peak"),), scale=GIB),
    ),
    RANKS: (
        Panel("Time in collectives", "s per step", (("ranks/learner-*/collectives_s", "learner-*"),)),
        Panel("Slowest rank", "its number", ((SLOWEST, "slowest"),), is_number=True),
        Panel("Imbalance", "largest planned cost / mean", ((IMBALANCE, "imbalance"),)),
        Panel("Memory of each rank's process", "GiB", (("memory/learner-*_bytes", "learner-*"),), scale=GIB),
        Panel("Peak memory of each rank's GPU", "GiB",
              (("memory/learner-*_device_peak_bytes", "learner-*"),), scale=GIB),
    ),
    "Optimizer": (
        Panel("Gradient norm", "", (("optim/grad_norm", "norm"),)),
        Panel("Loss", "", (("loss/policy", "loss"),)),
    ),
}  # fmt: skip


def expanded(panel: Panel, names: Collection[str]) -> Panel:
    """Return the panel with each `*` filled in from the metrics' names; series without `*` stay as they are."""
    return replace(panel, series=tuple(pair for each in panel.series for pair in _filled_in(*each, names)))


def _filled_in(metric: str, label: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    if "*" not in metric:
        yield metric, label
        return
    # A name at the end is whole; in between, such as a rank's, it ends before what follows.
    name = r"(.+)" if metric.endswith("*") else r"([^/_]+)"
    pattern = re.compile(re.escape(metric).replace(r"\*", name))
    matches = filter(None, map(pattern.fullmatch, names))
    for match in sorted(matches, key=lambda match: by_number(label.replace("*", match[1]))):
        yield match[0], label.replace("*", match[1])
