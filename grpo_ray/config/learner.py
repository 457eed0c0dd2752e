"""The configuration of the Learner: the optimizer, micro-batches, devices, profiler, supervised steps."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.section import Cores, Decay, HomePath, NonNegativeFloat, NonNegativeInt, Section

MAX_PROFILED_STEPS = 20
LARGEST_BETA_IN_BFLOAT16 = 0.99

Recomputation = Literal["none", "full", "selective"]


class LearnerConfig(Section):
    learning_rate: NonNegativeFloat = 1e-5
    """Peak AdamW learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0 to the peak learning rate; then `lr_schedule`."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: `constant`, or a decay from the peak, `linear` or `cosine`. It would
    reach `min_lr_ratio` of the peak one step after `algorithm.num_steps`. All updates of a step have one
    rate."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the peak learning rate at which a decay ends."""
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
    share_prompts: Literal["auto", "never"] = "auto"
    """`auto` computes a prompt once for all its responses in a micro-batch, if the model's attention can be
    replaced; `never` pads one row per response."""
    gradient_checkpointing: Recomputation = "none"
    """Activations to recompute in the backward pass. `full` keeps only the inputs of blocks, and takes a third
    more time. `selective` also keeps the outputs of matrix products and attention, and recomputes the cheap
    rest. `true` and `false` are accepted for `full` and `none`."""
    compile: bool = False
    """Compile blocks and output layer with torch.compile. It takes a C++ compiler and a slower first step."""
    moments: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Data type of AdamW's two moments: 4, 2 or 1 bytes each per parameter. `bfloat16` needs betas of at most
    0.99; `8bit` needs the package bitsandbytes."""
    num_ranks: PositiveInt = 1
    """Processes that share the Learner's work, each on its own device. FSDP2 shards weights, gradients and
    optimizer state over them, and each computes a share of every batch. The update is the same as with one."""
    replicas: PositiveInt = 1
    """Copies of the sharded weights, each sharded over `num_ranks / replicas` ranks (HSDP). Most communication
    is then between the ranks of one replica, which should be on one node."""
    ranks_per_node: PositiveInt | None = None
    """Ranks per node; default: the largest number up to 8 that divides a replica's ranks evenly."""
    collective_timeout_s: PositiveFloat = 300.0
    """Time that a rank waits for the others; then the Learner is restored from the last checkpoint."""
    num_gpus: Annotated[int, Field(ge=0, le=1)] = 1
    """1 per rank, or 0 to run on the CPU."""
    num_cpus: NonNegativeFloat = 1
    """CPUs that each rank reserves in Ray."""
    num_threads: PositiveInt = 1
    """CPU threads of each rank (CPU only)."""
    cpu_cores: Cores = None
    """Cores to pin the Learner's process to (CPU only), divided among the ranks; default: any."""
    slowdown_s: NonNegativeFloat = 0.0
    """Artificial delay per step in seconds, for experiments with schedules."""
    peak_tflops: PositiveFloat | None = None
    """Peak in 10^12 FLOP/s in `model.dtype`, for `perf/mfu`; default: the data sheet's, of a known GPU."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step to record with torch's profiler (traces in `profile/`); these steps take longer."""

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _accept_booleans(cls, value: object) -> object:
        return {True: "full", False: "none"}[value] if isinstance(value, bool) else value

    def _conflicts(self) -> Iterator[str]:
        if self.compile and self.gradient_checkpointing == "selective":
            yield (
                "gradient_checkpointing: a compiled block hides its operations from `selective`, and already "
                "recomputes the cheap ones; with learner.compile choose none or full"
            )
        if self.num_ranks % self.replicas:
            yield (
                f"replicas: {self.num_ranks} ranks (learner.num_ranks) cannot be divided into {self.replicas} "
                "equal replicas"
            )
        if self.num_ranks % self.num_ranks_per_node:
            yield (
                f"ranks_per_node: {self.num_ranks} ranks (learner.num_ranks) cannot be divided into nodes of "
                f"{self.num_ranks_per_node}; set learner.ranks_per_node to a divisor of learner.num_ranks"
            )
        if self.num_ranks > 1 and self.moments == "8bit":
            yield (
                "moments: 8bit cannot be sharded, so it needs learner.num_ranks of 1; with more ranks use "
                "bfloat16"
            )
        if self.num_ranks > 1 and self.cpu_cores is not None and len(self.cpu_cores) < self.num_ranks:
            yield (
                f"cpu_cores: {len(self.cpu_cores)} cores cannot be dealt to {self.num_ranks} ranks "
                "(learner.num_ranks); name at least one per rank, or none"
            )
        if self.moments == "bfloat16" and max(self.betas) > LARGEST_BETA_IN_BFLOAT16:
            yield (
                f"moments: a bfloat16 moment can round away changes of less than 1 in 256, as with betas "
                f"{list(self.betas)}; set learner.betas to at most {LARGEST_BETA_IN_BFLOAT16}, or moments to "
                "float32"
            )

    @property
    def num_ranks_per_node(self) -> int:
        if self.ranks_per_node is not None:
            return self.ranks_per_node
        in_replica = self.num_ranks // self.replicas
        return max(number for number in range(1, 9) if in_replica % number == 0)

    def cores_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the cores that a rank is pinned to."""
        return self.cpu_cores and self.cpu_cores[rank :: self.num_ranks]

    @field_validator("profile_steps")
    @classmethod
    def _check_profile(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and not 0 <= steps[1] - steps[0] < MAX_PROFILED_STEPS:
            raise ValueError(
                f"steps {steps[0]} to {steps[1]} cannot be profiled: give the first and the last, at most "
                f"{MAX_PROFILED_STEPS} of them, such as [10, 12]; each trace may be hundreds of megabytes"
            )
        return steps


class SftConfig(Section):
    """Supervised steps on demonstrations, before the first step of GRPO."""

    path: HomePath
    """`.jsonl` or `.parquet` file of demonstrations. A row has `messages`, the last from the assistant; or a
    question, which `task.prompt` turns into a prompt, and a response."""
    prompt_field: str = "prompt"
    """Field of a row that holds the question."""
    response_field: str = "response"
    """Field of a row that holds the response to imitate."""
    num_steps: PositiveInt = 100
    """Supervised steps."""
    batch_size: PositiveInt = 32
    """Demonstrations per step, shuffled in every epoch."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate: a linear ramp over a tenth of the steps, then linear decay to 0. The section
    `learner` has the optimizer's other values."""
