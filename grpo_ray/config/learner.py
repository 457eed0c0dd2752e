"""The configuration of the Learner: the optimizer, micro-batches, devices and the profiler."""

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.section import Decay, NonNegativeFloat, NonNegativeInt, Section, refuse_no_cores

MAX_PROFILED_STEPS = 20


class LearnerConfig(Section):
    learning_rate: NonNegativeFloat = 1e-5
    """Peak AdamW learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0 to the peak learning rate; constant afterwards."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates for the running means of the gradient and of its square."""
    adam_eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay: each update shrinks the weights by this times the learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient norm above which gradients are scaled down to it."""
    micro_batch_tokens: PositiveInt = 8192
    """Tokens (padding included) per forward and backward pass; the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    num_gpus: Annotated[int, Field(ge=0, le=1)] = 1
    """1, or 0 to run on the CPU."""
    num_cpus: NonNegativeFloat = 1
    """CPUs that the Learner reserves in Ray."""
    num_threads: PositiveInt = 1
    """CPU threads (CPU only)."""
    cpu_cores: tuple[NonNegativeInt, ...] | None = None
    """Cores that the Learner's process is pinned to (CPU only); default: any."""
    slowdown_s: NonNegativeFloat = 0.0
    """Artificial delay per step in seconds, for experiments with schedules."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step to record with torch's profiler (traces in `profile/`); these steps take longer."""

    _check_cores = field_validator("cpu_cores")(refuse_no_cores)

    @field_validator("profile_steps")
    @classmethod
    def _check_profile(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 0 <= steps[1] - steps[0] < MAX_PROFILED_STEPS:
            raise ValueError(
                f"steps {steps[0]} to {steps[1]} cannot be profiled: give the first and the last, at most "
                f"{MAX_PROFILED_STEPS} of them, such as [10, 12]; each trace may be hundreds of megabytes"
            )
        return steps
