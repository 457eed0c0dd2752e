"""The configuration of sampling: the distribution of responses, and the Generators that draw them."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.engine_args import refuse_decided
from grpo_ray.config.section import Fraction, NonNegativeFloat, NonNegativeInt, Section, refuse_no_cores
from grpo_ray.config.user_code import one_of_or_own

EngineName = Annotated[str, one_of_or_own(("vllm", "torch"))]


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Divisor of the logits, in the engine and in the Learner; at least 0.01, which vLLM would use instead of
    anything lower."""
    top_p: Fraction = 1.0
    """Nucleus mass; training requires 1.0 (the error message says why)."""
    min_tokens: NonNegativeInt = 0
    """Minimum response length in tokens. Unless given, 4 if every prompt of the task ends with a tag that
    responses close, as `r1_zero` does."""
    max_tokens: PositiveInt = 1024
    """Maximum response length in tokens. Unless given, 24 for `model.tiny`."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; kept in the output. Unless given, `</answer>` if a prompt of the task ends
    with `<think>` or `<answer>`, as `r1_zero` and `short` do, and none for `chat` or `question_only`."""

    def _conflicts(self) -> Iterator[str]:
        if self.min_tokens > self.max_tokens:
            yield f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
        if self.top_p != 1.0:
            yield (
                f"top_p is {self.top_p}: rollouts must be sampled from the whole distribution (top_p 1.0), "
                "because the Learner cannot reproduce the logprobs of a truncated one"
            )


class EngineConfig(Section):
    """An inference engine: its kind, devices and memory."""

    _other_fields: ClassVar[Mapping[str, str]] = {}

    engine: EngineName = "vllm"
    """`vllm` for real runs; `torch` is a plain reference implementation. For Generators also one of your own:
    a class as `module:name`."""
    num_gpus: NonNegativeInt = 1
    """GPUs per engine (its tensor-parallel size); 0 runs on the CPU."""
    num_cpus: NonNegativeFloat = 1
    """CPUs that each engine's actor reserves in Ray."""
    gpu_memory_utilization: Fraction = 0.85
    """Share of the device's memory that vLLM may use; on a CPU, share of RAM."""
    max_num_seqs: PositiveInt = Field(default_factory=lambda given: 512 if given.get("num_gpus") else 256)
    """Sequences that the engine runs at the same time; default: 512 on GPUs, 256 on a CPU."""
    enforce_eager: bool = False
    """Skip graph capture and compilation: faster startup, slower sampling."""
    kv_cache_gib: PositiveFloat = 0.5
    """Size of the KV cache on a CPU, in GiB."""
    num_threads: PositiveInt = 1
    """CPU threads per engine (CPU only)."""
    cpu_cores: tuple[NonNegativeInt, ...] | None = None
    """Cores that the engines' processes are pinned to (CPU only); default: any."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, such as `{quantization: fp8, enable_expert_parallel: true}`.
    What the run decides (the model, its dtype, the seed, the distribution of responses) is refused here."""

    _check_cores = field_validator("cpu_cores")(refuse_no_cores)

    @field_validator("engine_args")
    @classmethod
    def _leave_what_the_run_decides(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        refuse_decided(arguments, cls._other_fields)
        return arguments

    def _conflicts(self) -> Iterator[str]:
        if self.engine_args and self.engine != "vllm":
            yield f"engine_args are vLLM's, and engine is `{self.engine}`: remove them, or use `vllm`"


class GeneratorConfig(EngineConfig):
    """Engines that sample. `engine_args.max_num_batched_tokens` is 8192 on GPUs unless given."""

    num_generators: PositiveInt = 1
    """Generator actors, each with its own engine."""
    max_starting: PositiveInt = 64
    """Generators that start at the same time, at the beginning and after deaths; the others wait for their
    turn, so that reading the model overruns no file system. Each one's `recovery.start_timeout_s` counts from
    its turn."""
    max_model_len: PositiveInt | None = None
    """Maximum length of prompt plus response in tokens; default: longest prompt + `sampling.max_tokens`."""
    colocated: bool = False
    """Generators and Learner share the devices and take turns (synchronous runs only)."""
    slowdown_s: NonNegativeFloat = 0.0
    """Artificial delay per group in seconds, for experiments with schedules."""
