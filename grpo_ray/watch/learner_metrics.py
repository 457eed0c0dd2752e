"""The Learner's metrics of a step, from sums over its micro-batches, and torch's traces of single steps."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_ray.objectives.kl import effective_sample_fraction
from grpo_ray.records.run_files import step_name

Sums = dict[str, float]
RATIOS = {  # the two sums that a metric is the ratio of
    "loss/clip_frac": ("num_clipped", "num_ratios"),
    "loss/clip_frac/low": ("num_clipped_low", "num_ratios"),
    "loss/gradient_scale": ("gradient_sum", "plain_gradient_sum"),
    "mismatch/kl": ("mismatch_kl", "num_weights"),
    "mismatch/kl/after_switch": ("after_switch_kl", "num_after_switch"),
    "correction/weight/mean": ("correction_weight_sum", "num_corrected"),
    "correction/limited_frac": ("num_limited", "num_corrected"),
    "correction/dropped_frac": ("num_dropped", "num_corrected"),
    "perf/prompt_frac": ("prompt_tokens", "computed_tokens"),
    "perf/padding_frac": ("padding_tokens", "computed_tokens"),
    "policy/entropy/exact": ("entropy", "entropy_tokens"),
    "loss/kl_ref": ("kl_k1_sum", "kl_tokens"),
    "loss/kl_ref_k3": ("kl_k3_sum", "kl_tokens"),
}


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
    metrics = {
        name: sums[part] / sums[whole]
        for name, (part, whole) in RATIOS.items()
        if part in sums and sums.get(whole)
    }
    if ratios := sums.get("num_ratios"):
        metrics["loss/clip_frac/high"] = (sums["num_clipped"] - sums["num_clipped_low"]) / ratios
    if sums.get("plain_gradient_sum"):
        # A clipped token has no gradient by right.
        unexplained = max(0.0, sums["num_without_gradient"] - sums.get("num_clipped", 0.0))
        metrics["loss/untrained_frac"] = unexplained / sums["num_gradients"]
    if compared := sums.get("num_weights"):
        sampled = effective_sample_fraction(sums["weight_sum"], sums["weight_square_sum"], compared)
        metrics |= {
            "mismatch/logprob_diff/max": sums["logprob_diff_max"],
            "mismatch/ess_frac": sampled,
            "mismatch/tokens_after_switch": sums["num_after_switch"],
        }
    if sums.get("num_corrected"):
        metrics["correction/weight/min"] = sums["correction_weight_min"]
        metrics["correction/weight/max"] = sums["correction_weight_max"]
    return metrics


class StepProfiler:
    """A profiler for a range of steps. Each trace is written before the next step, so memory holds one step."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path | None) -> None:
        """Profile the steps from the first to the last, inclusive; None profiles nothing."""
        self._steps, self._folder = steps, folder
        self._trace: tuple[int, profile] | None = None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the block as the step's work; if it succeeds there is a trace to write."""
        if self._folder is None or self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler, record_function(f"step {step}"):
            yield
        self._trace = step, profiler

    @property
    def has_trace(self) -> bool:
        """True if a trace has not been written yet."""
        return self._trace is not None

    def write(self) -> str | None:
        """Write the step's trace to `<folder>/step-000010.json.gz`; return why it could not be written."""
        assert self._trace is not None, "profile a step first"
        assert self._folder is not None
        (step, profiler), self._trace = self._trace, None
        path = self._folder / f"{step_name(step)}.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # from gzip and from torch's writer
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return f"the profile of step {step} could not be written: {error}"
        return None
