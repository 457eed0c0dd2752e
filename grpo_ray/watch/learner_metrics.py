"""The Learner's metrics of a step, from sums over its micro-batches, and torch's traces of single steps."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from grpo_ray.objectives.kl import effective_sample_fraction
from grpo_ray.records.run_files import step_name

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
            "mismatch/tokens_after_switch": got["num_after_switch"],
        }
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
