"""The figures of the Learner's step by which its settings are tuned: how well it uses the device."""

import torch

from grpo_ray.config import Config
from grpo_ray.watch.flops import WorkCount, peak_flops

DEVICE_PEAK = "memory/learner_device_peak_bytes"


class Performance:
    """The figures of one step after another, per device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._num_devices = config.learner.num_ranks
        self._device, self._peak_flops = device, _peak(config, device)

    def take(self, work: WorkCount, seconds: float) -> dict[str, float]:
        """Return the figures of the step that did `work` in `seconds` on all devices; begin those of the next.

        Those that cannot be known are absent: the utilization without a known peak, the memory on a CPU.
        """
        seconds *= self._num_devices
        metrics = {"perf/tokens_per_s_per_device": work.trained_tokens / seconds}
        if self._peak_flops is not None:
            metrics["perf/mfu"] = work.flops / seconds / self._peak_flops
        if self._device.type == "cuda":
            metrics[DEVICE_PEAK] = float(torch.cuda.max_memory_allocated(self._device))
            torch.cuda.reset_peak_memory_stats(self._device)
        work.reset()
        return metrics


def _peak(config: Config, device: torch.device) -> float | None:
    """Return the device's peak in FLOP/s in `model.dtype`; None if no data sheet and no user gives it."""
    if config.learner.peak_tflops is not None:
        return 1e12 * config.learner.peak_tflops
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), getattr(torch, config.model.dtype))
