"""The charts of the web page: which metrics share one, and their unit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One chart over steps; `series` are (metric, label) pairs, drawn as in `metrics.jsonl`."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    is_share: bool = False  # drawn from 0 to 1, unless a value is outside
    bands: bool = False  # drawn for the series that have standard errors


REWARD, VALIDATION = "reward/mean", "eval/reward"  # the series with standard errors

PANELS: dict[str, tuple[Panel, ...]] = {
    "Reward": (
        Panel("Training reward", "mean over a step's responses", ((REWARD, "training"),), True, True),
        Panel("Validation reward", "mean", ((VALIDATION, "validation"),), True, True),
        Panel("Format and answer", "share", (("reward/format", "format"), ("reward/answer", "answer")), True),
    ),
    "Lag and staleness": (
        Panel("Age of trained tokens", "versions", (("lag/mean", "mean"), ("lag/max", "max"))),
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
    "Throughput": (
        Panel("Tokens per second", "tokens/s",
              (("throughput/sampled_tokens_per_s", "sampled"), ("throughput/trained_tokens_per_s", "trained"))),
        Panel("Utilization", "share",
              (("utilization/learner", "Learner"), ("utilization/generators", "Generators")), True),
        Panel("Model FLOPs utilization", "share of the peak", (("perf/mfu", "Learner"),), True),
        Panel("Training rate", "tokens/s per device", (("perf/tokens_per_s_per_device", "trained"),)),
        Panel("Computed tokens", "share",
              (("perf/prompt_frac", "prompts"), ("perf/padding_frac", "padding")), True),
        Panel("Peak memory of the Learner's GPU", "bytes", (("memory/learner_device_peak_bytes", "peak"),)),
    ),
    "Optimizer": (
        Panel("Gradient norm", "", (("optim/grad_norm", "norm"),)),
        Panel("Loss", "", (("loss/policy", "loss"),)),
    ),
}  # fmt: skip


def charted() -> set[str]:
    """Return all metrics that a chart shows."""
    return {metric for panels in PANELS.values() for panel in panels for metric, _ in panel.series}
