"""The run's metrics as Ray metrics, which Prometheus scrapes from every node's metrics port."""

import os
import re
from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from grpo_ray.watch.metrics_catalog import COLLECTIVES, IMBALANCE, SLOWEST, STAGE

MEMORY = re.compile(r"memory/(?P<process>.+)_bytes")
SECONDS = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0]

STAGE_SECONDS = "grpo_ray_stage_seconds"
STAGE_TIME = "grpo_ray_stage_time_seconds"
COLLECTIVE_TIME = "grpo_ray_collective_time_seconds"
MEMORY_BYTES = "grpo_ray_memory_bytes"
PHASE = "grpo_ray_phase"
STEP = "grpo_ray_step"
GAUGES = {
    "reward/mean": "grpo_ray_reward",
    "eval/reward": "grpo_ray_validation_reward",
    "rollout/response_tokens/mean": "grpo_ray_response_tokens",
    "rollout/truncated_frac": "grpo_ray_truncated_ratio",
    "loss/policy": "grpo_ray_loss",
    "policy/entropy": "grpo_ray_entropy",
    "optim/grad_norm": "grpo_ray_grad_norm",
    "mismatch/kl": "grpo_ray_mismatch_kl",
    "lag/mean": "grpo_ray_lag_mean",
    "lag/max": "grpo_ray_lag_max",
    "buffer/groups": "grpo_ray_buffer_groups",
    "buffer/bytes": "grpo_ray_buffer_bytes",
    "utilization/learner": "grpo_ray_learner_utilization",
    "utilization/generators": "grpo_ray_generator_utilization",
    "throughput/sampled_tokens_per_s": "grpo_ray_sampled_tokens_per_second",
    "throughput/trained_tokens_per_s": "grpo_ray_trained_tokens_per_second",
    "perf/mfu": "grpo_ray_model_flops_utilization",
    "perf/tokens_per_s_per_device": "grpo_ray_tokens_per_second_per_device",
    "perf/prompt_frac": "grpo_ray_prompt_ratio",
    "perf/padding_frac": "grpo_ray_padding_ratio",
    "timing/step_s": "grpo_ray_step_seconds",
    "recovery/restarts": "grpo_ray_restarts",
    SLOWEST: "grpo_ray_slowest_rank",
    IMBALANCE: "grpo_ray_rank_imbalance",
}
"""Gauge names by metric. Ray prefixes the names with `ray_`; dashboards rely on them."""


def are_on() -> bool:
    """Return whether Ray collects metrics at all (its setting `enable_metrics_collection`)."""
    setting = os.environ.get("RAY_enable_metrics_collection", "true")  # noqa: SIM112 (Ray's own spelling)
    return setting.lower() not in ("0", "false")


class RayMetrics:
    """Exports each step's metrics and the run's phase; the process must be connected to Ray."""

    def __init__(self, run_name: str) -> None:
        self._run = {"run": run_name.encode("ascii", "backslashreplace").decode()}  # Ray takes no other letters
        tags = "run", "actor", "stage"
        self._stages = Histogram(STAGE_SECONDS, "Seconds of each actor's stages in a step", SECONDS, tags)
        # Ray records each histogram value as the middle of its bucket, so the histogram's sum is not exact.
        self._stage_time = Counter(STAGE_TIME, "Seconds of each actor's stages so far", tags)
        self._collectives = Counter(
            COLLECTIVE_TIME, "Seconds of each of the Learner's ranks in collectives so far", ("run", "actor")
        )
        self._memory = Gauge(MEMORY_BYTES, "Resident memory of a process", ("run", "process"))
        self._phase = Gauge(PHASE, "1 for the driver's current phase, 0 for the others", ("run", "phase"))
        self._step = Gauge(STEP, "Steps completed by the Learner", ("run",))
        self._gauges = {name: Gauge(gauge, name, ("run",)) for name, gauge in GAUGES.items()}
        self._last_phase: str | None = None

    def line(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the numbers of the step's line in metrics.jsonl."""
        self._step.set(step, self._run)
        for name, value in metrics.items():
            if name in self._gauges:
                self._gauges[name].set(value, self._run)
            elif stage := STAGE.fullmatch(name):
                tags = {**self._run, **stage.groupdict()}
                self._stages.observe(value, tags)
                if value > 0:  # Ray refuses 0
                    self._stage_time.inc(value, tags)
            elif (rank := COLLECTIVES.fullmatch(name)) and value > 0:
                self._collectives.inc(value, {**self._run, **rank.groupdict()})
            elif memory := MEMORY.fullmatch(name):
                self._memory.set(value, {**self._run, **memory.groupdict()})

    def phase(self, phase: str) -> None:
        """Export the run's current phase."""
        if self._last_phase is not None:
            self._phase.set(0, {**self._run, "phase": self._last_phase})
        self._phase.set(1, {**self._run, "phase": phase})
        self._last_phase = phase
