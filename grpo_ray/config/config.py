"""The configuration: a tree of frozen pydantic models, read from YAML, changed by dotted overrides.

The defaults are the course handout's, for real models; `configs/` holds one YAML a use.
"""

import math
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.model import ModelConfig
from grpo_ray.config.placement import PlacementConfig
from grpo_ray.config.schedule import BufferConfig, WeightSyncConfig
from grpo_ray.config.section import Decay, Fraction, NonNegativeFloat, NonNegativeInt, Section
from grpo_ray.config.task import Task
from grpo_ray.config.tracking import TrackingConfig


class RunConfig(Section):
    name: str | None = None
    """Name of the run directory under `output_dir`; default: the config file's name and the time."""
    output_dir: str = "runs"
    """Folder that holds the run directories; on several machines, a folder they share."""
    seed: NonNegativeInt = 0
    """Seeds the task, the prompt order, the engines and the tiny model."""
    save_rollouts: bool = True
    """Write every trained rollout to `rollouts/step-*.parquet`."""
    if_exists: Literal["refuse", "resume"] = "refuse"
    """What `train` does when the run directory exists: `resume` lets a resubmitted job go on."""
    on_preemption_s: PositiveFloat = 30.0
    """Seconds from SIGTERM to a checkpoint and the end; what takes longer is abandoned."""


class SamplingConfig(Section):
    temperature: PositiveFloat = 1.0
    """Both the engine and the Learner divide logits by it."""
    top_p: Fraction = 1.0
    """Nucleus mass; only 1.0 can be trained on (see the refusal)."""
    min_tokens: NonNegativeInt = 4
    """No end of the response before so many tokens."""
    max_tokens: PositiveInt = 1024
    """Longest response, in tokens."""
    stop: tuple[str, ...] = ("</answer>",)
    """Strings that end a response; kept in the output."""

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingConfig":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p is {self.top_p}: rollouts must be sampled from the whole distribution (top_p 1.0), "
                "because the Learner cannot reproduce the logprobs of a truncated one"
            )
        return self


def _some_cores(cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if cores == ():
        raise ValueError("an empty list leaves no core to run on; name some, or give null for any")
    return cores


class GeneratorConfig(Section):
    num_generators: PositiveInt = 1
    """Generator actors, each with an engine of its own."""
    engine: Literal["vllm", "torch"] = "vllm"
    """`vllm` is the product; `torch` is the plain reference."""
    num_gpus: NonNegativeInt = 1
    """GPUs of each Generator (its tensor-parallel size); 0 runs on the CPU."""
    num_cpus: NonNegativeFloat = 1
    """CPUs each Generator reserves in Ray."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of the device's memory vLLM may take; on a CPU, of RAM."""
    max_model_len: PositiveInt | None = None
    """Longest prompt and response together, in tokens; default: longest prompt + `sampling.max_tokens`."""
    max_num_seqs: PositiveInt = 256
    """Sequences the engine runs at a time."""
    enforce_eager: bool = False
    """Skip graph capture and compilation: quicker start, slower sampling."""
    kv_cache_gib: PositiveFloat = 0.5
    """Size of the KV cache on a CPU, in GiB."""
    num_threads: PositiveInt = 1
    """CPU threads of each engine (CPU only)."""
    cpu_cores: tuple[NonNegativeInt, ...] | None = None
    """Cores to hold the Generators' processes to (CPU only); default: the system's choice."""
    colocated: bool = False
    """Generators and Learner share the devices and take turns (synchronous only)."""
    slowdown_s: NonNegativeFloat = 0.0
    """Seconds every group is held back, for trying schedules."""

    _check_cores = field_validator("cpu_cores")(_some_cores)


class ScorerConfig(Section):
    num_cpus: NonNegativeFloat = 0
    """CPUs the Scorer reserves in Ray."""
    num_workers: PositiveInt = 4
    """Processes that grade mathematics, or with a function of yours; the other rewards need none."""
    timeout_s: PositiveFloat = 5.0
    """Seconds one response may take to grade; then its worker is ended, and it counts in `reward/errors`."""
    memory_gib: PositiveFloat = 2.0
    """Memory that one response may take to grade beside the libraries, in GiB; with more it ends likewise."""


MAX_PROFILED_STEPS = 20


class LearnerConfig(Section):
    learning_rate: NonNegativeFloat = 1e-5
    """Peak AdamW rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear ramp from 0 to the peak rate; constant after."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates of the gradient's mean and of its square's."""
    adam_eps: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled: each update shrinks the weights by this times the learning rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: PositiveInt = 8192
    """Tokens (padding included) of one forward and backward; the gradient does not depend on it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    num_gpus: Annotated[int, Field(ge=0, le=1)] = 1
    """1, or 0 to run on the CPU."""
    num_cpus: NonNegativeFloat = 1
    """CPUs the Learner reserves in Ray."""
    num_threads: PositiveInt = 1
    """CPU threads (CPU only)."""
    cpu_cores: tuple[NonNegativeInt, ...] | None = None
    """Cores to hold the Learner's process to (CPU only); default: the system's choice."""
    slowdown_s: NonNegativeFloat = 0.0
    """Seconds every step is held back, for trying schedules."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step of which torch's profiler writes a trace (`profile/`); such a step takes longer."""

    _check_cores = field_validator("cpu_cores")(_some_cores)

    @field_validator("profile_steps")
    @classmethod
    def _check_profile(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 0 <= steps[1] - steps[0] < MAX_PROFILED_STEPS:
            raise ValueError(
                f"steps {steps[0]} to {steps[1]} cannot be profiled: give the first and the last, at most "
                f"{MAX_PROFILED_STEPS} of them, such as [10, 12]; each trace may be hundreds of megabytes"
            )
        return steps


class EvaluationConfig(Section):
    every_num_steps: PositiveInt = 20
    """Validate at step 0, every so many steps, and at the end."""
    samples_per_prompt: PositiveInt = 1
    """Responses a validation prompt, at the training temperature."""


class CheckpointConfig(Section):
    every_num_steps: PositiveInt = 20
    """A checkpoint every so many steps, at the end, and when the run is interrupted."""
    keep: PositiveInt = 2
    """The newest so many are kept."""
    keep_best: bool = True
    """And the one with the best validation reward."""


class RecoveryConfig(Section):
    """What happens when something breaks."""

    max_restarts: NonNegativeInt = 20
    """Generators and Scorers restarted in a run, all together; past it the run ends with a checkpoint."""
    restart_backoff_s: NonNegativeFloat = 1.0
    """Seconds before an actor is restarted; doubles with every restart that follows within ten minutes."""
    max_restores: NonNegativeInt = 3
    """Times a run goes back to its last checkpoint by itself (a Learner or buffer that died)."""
    group_timeout_s: PositiveFloat = 1800.0
    """Seconds one group may be sampled; then it is aborted and its prompt tried again."""
    max_group_retries: NonNegativeInt = 3
    """Tries again of one prompt; then it is set aside and reported at the end."""
    stall_timeout_s: PositiveFloat = 1800.0
    """Seconds without any progress before the run says who waits for what, and replaces who is stuck."""
    max_skipped_updates: PositiveInt = 3
    """So many steps in a row without a finite update end the run with a checkpoint of the last good weights."""


class Config(Section):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: Annotated[Task, Field(discriminator="kind")]
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    generator: GeneratorConfig = GeneratorConfig()
    scorer: ScorerConfig = ScorerConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def rollouts_per_step(self) -> int:
        return self.algorithm.prompts_per_step * self.algorithm.samples_per_prompt

    @property
    def replayed_per_step(self) -> int:
        """Groups of a batch that come from earlier ones, once there are any."""
        return round(self.algorithm.prompts_per_step * self.buffer.replay.frac)

    @property
    def fresh_per_step(self) -> int:
        """Groups of a batch that are sampled for it."""
        return self.algorithm.prompts_per_step - self.replayed_per_step

    @property
    def num_oversampled(self) -> int:
        """Groups in flight beyond those that the steps need."""
        return math.ceil(self.fresh_per_step * self.algorithm.oversample_frac)

    @property
    def steps_overtaken(self) -> int:
        """Steps that the look-ahead can make a group wait beyond its turn."""
        return -(-(self.buffer.lookahead - 1) // self.fresh_per_step)

    @property
    def num_updates(self) -> int:
        """Optimizer updates on a whole batch."""
        size = self.algorithm.train_batch_size or self.rollouts_per_step
        return self.algorithm.epochs_per_batch * -(-self.rollouts_per_step // size)

    @property
    def max_token_age(self) -> int:
        """The oldest token that a step may train on, in versions."""
        return self.buffer.replay.max_age if self.replayed_per_step else self.weight_sync.max_lag

    @property
    def gpus_per_generator(self) -> float:
        """What Ray reserves: those who are colocated share one GPU."""
        return self.generator.num_gpus / 2 if self.generator.colocated else self.generator.num_gpus

    @property
    def gpus_of_learner(self) -> float:
        return self.learner.num_gpus / 2 if self.generator.colocated else self.learner.num_gpus

    @model_validator(mode="after")
    def _profiled_steps_come(self) -> "Config":
        profiled, num_steps = self.learner.profile_steps, self.algorithm.num_steps
        if profiled is not None and profiled[0] > num_steps:
            raise ValueError(
                f"learner.profile_steps begins with step {profiled[0]}, and the run ends with step {num_steps} "
                "(algorithm.num_steps); profile an earlier one"
            )
        return self

    @model_validator(mode="after")
    def _colocated_is_possible(self) -> "Config":
        generator, learner, max_lag = self.generator, self.learner, self.weight_sync.max_lag
        is_ipc = self.weight_sync.transport == "ipc"
        if is_ipc and not (generator.colocated and generator.num_gpus and generator.engine == "vllm"):
            raise ValueError(
                "weight_sync.transport: `ipc` hands weights over on one GPU, from Learner to vLLM: it needs "
                "generator.colocated, generator.engine `vllm` and a GPU; use `object_store`"
            )
        if is_ipc and self.weight_sync.checksum:
            raise ValueError(
                "weight_sync.checksum: the bytes never leave the GPU with transport `ipc`; set it to false"
            )
        if not generator.colocated:
            return self
        if max_lag:
            raise ValueError(
                "generator.colocated: who takes turns is synchronous; "
                f"set weight_sync.max_lag to 0 (it is {max_lag})"
            )
        shares = generator.num_gpus, learner.num_gpus
        if any(shares) and (shares != (1, 1) or generator.num_generators > 1):
            raise ValueError(
                "generator.colocated: one Generator and the Learner share one GPU; set "
                "generator.num_generators, generator.num_gpus and learner.num_gpus to 1 (they are "
                f"{generator.num_generators}, {shares[0]} and {shares[1]}), or both num_gpus to 0 for the CPU"
            )
        return self

    @model_validator(mode="after")
    def _tables_have_rollouts(self) -> "Config":
        tracking = self.tracking
        if tracking.trackers and tracking.rollouts_every_num_steps and not self.run.save_rollouts:
            raise ValueError(
                "tracking.rollouts_every_num_steps: tables of rollouts are read from the run's files; set "
                "run.save_rollouts to true, or tracking.rollouts_every_num_steps to 0"
            )
        return self

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> "Config":
        max_lag, replay = self.weight_sync.max_lag, self.buffer.replay
        if replay.frac and not 0 < self.replayed_per_step < self.algorithm.prompts_per_step:
            raise ValueError(
                f"buffer.replay.frac is {replay.frac:g}: of algorithm.prompts_per_step "
                f"({self.algorithm.prompts_per_step}) at least one group must be replayed and one fresh"
            )
        if replay.frac and replay.max_groups < self.replayed_per_step:
            raise ValueError(
                f"buffer.replay.max_groups ({replay.max_groups}) must be at least the {self.replayed_per_step} "
                "groups that a batch replays (buffer.replay.frac)"
            )
        if replay.frac and replay.max_age <= max_lag:
            raise ValueError(
                f"buffer.replay.max_age ({replay.max_age}) must exceed weight_sync.max_lag ({max_lag}): "
                "a group is a version older when it can be replayed"
            )
        if self.steps_overtaken > max_lag:
            raise ValueError(
                f"buffer.lookahead is {self.buffer.lookahead}: a group can come {self.steps_overtaken} steps "
                f"late; weight_sync.max_lag ({max_lag}) must be at least that"
            )
        if self.buffer.lookahead > 1 and self.algorithm.oversample_frac:
            raise ValueError(
                "buffer.lookahead keeps stragglers for the next step, algorithm.oversample_frac cuts them off; "
                "choose one"
            )
        if self.algorithm.overlong_buffer_tokens >= self.sampling.max_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens ({self.algorithm.overlong_buffer_tokens}) must be below "
                f"sampling.max_tokens ({self.sampling.max_tokens})"
            )
        return self
