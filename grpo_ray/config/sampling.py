"""The configuration of engines: the distribution of responses, the Generators that draw them, and Teachers."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.section import Cores, Fraction, HomePath, NonNegativeFloat, NonNegativeInt, Section
from grpo_ray.config.user_code import one_of_or_own

_ONE_ENGINE = "set generator.num_gpus and generator.num_generators"
_DISTRIBUTION = "only the fields of sampling may shape the distribution, which the Learner reproduces"
_ONE_MODEL = "the Learner and the engine read the same model.path"

# vLLM's arguments that a run decides itself, with the remedy.
DECIDED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "hf_config_path"), "set model.path"),
    "dtype": "set model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
    "hf_overrides": f"set model.head_dtype for its head_dtype, remove the others: {_ONE_MODEL}",
    "seed": "set run.seed",
    "max_model_len": "set generator.max_model_len",
    "max_num_seqs": "set generator.max_num_seqs",
    "gpu_memory_utilization": "set generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set generator.kv_cache_gib",
    "enforce_eager": "set generator.enforce_eager",
    "enable_sleep_mode": "set generator.colocated",
    "weight_transfer_config": "set weight_sync.transport",
    "worker_extension_cls": "remove it: the run sets it for weight syncs",
    "hf_token": "set the environment variable HF_TOKEN",
    "tensor_parallel_size": "set generator.num_gpus",
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size", "nnodes"), _ONE_ENGINE),
    **dict.fromkeys(("data_parallel_size", "data_parallel_size_local"), "set generator.num_generators"),
    "device_ids": "remove it: Ray assigns the GPUs",
    "distributed_executor_backend": "remove it: one GPU runs in the engine's process, several in one each",
    "load_format": "remove it: weights are read from safetensors, never from a pickle",
    "skip_tokenizer_init": "remove it: stop strings need the tokenizer",
    "disable_log_stats": "remove it: the run reports its own metrics",
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), f"remove it: {_ONE_MODEL}"),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "watermark_config"),
        f"remove it: {_DISTRIBUTION}",
    ),
    "logprobs_mode": "remove it: behaviour logprobs are taken at the sampling temperature",
    "enable_lora": "remove it: the engine serves the whole policy, without adapters",
}


class SamplingConfig(Section):
    temperature: Annotated[float, Field(ge=0.01, le=2.0)] = 1.0
    """Divisor of the logits, in the engine and in the Learner, within vLLM's limits."""
    top_p: Fraction = 1.0
    """Nucleus mass; training requires 1.0 (the error message says why)."""
    min_tokens: NonNegativeInt = 0
    """Shortest response in tokens; default: 4 if prompts end with a tag that responses close (`r1_zero`)."""
    max_tokens: PositiveInt = 1024
    """Maximum response length in tokens. If omitted, 24 for `model.tiny`."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response and stay in the output. If omitted, `</answer>` if a prompt of the task ends
    with `<think>` or `<answer>`, as in `r1_zero` and `short`; none for `chat` and `question_only`."""

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

    _other_fields: ClassVar[Mapping[str, str]] = {}  # in the place of these parts of DECIDED's fields

    engine: Annotated[str, one_of_or_own(("vllm", "torch"))] = "vllm"
    """`vllm` for real runs, `torch` for a plain reference implementation. Generators also take one of your own:
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
    kv_cache_gib: PositiveFloat | None = Field(
        default_factory=lambda given: None if given.get("num_gpus") else 0.5
    )
    """Size of the KV cache in GiB; default: 0.5 on a CPU, and on GPUs what `gpu_memory_utilization` leaves. Set
    it where other processes use the GPU while vLLM starts: it would count their memory as its own."""
    num_threads: PositiveInt = 1
    """CPU threads per engine (CPU only)."""
    cpu_cores: Cores = None
    """Cores that the engines' processes are pinned to (CPU only); default: any."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's AsyncEngineArgs, such as `{quantization: fp8, enable_expert_parallel: true}`.
    Those that the run decides are refused: the model, its dtype, the seed, the distribution of responses."""

    @field_validator("engine_args")
    @classmethod
    def _leave_what_the_run_decides(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        decided = [f"{name} is decided by the run; {DECIDED[name]}" for name in arguments if name in DECIDED]
        text = "; ".join(decided)
        for field, other in cls._other_fields.items():
            text = text.replace(field, other)
        if text:
            raise ValueError(text)
        return arguments

    def _conflicts(self) -> Iterator[str]:
        if self.engine_args and self.engine != "vllm":
            yield f"engine_args are for vLLM, but engine is `{self.engine}`: remove them, or use `vllm`"


class GeneratorConfig(EngineConfig):
    """Engines that sample. Defaults: `max_num_batched_tokens` of 8192 on GPUs, `block_size` of 32 on CPUs."""

    num_generators: PositiveInt = 1
    """Generator actors, each with its own engine."""
    max_starting: PositiveInt = 64
    """Generators that start at the same time, at the beginning and after deaths. The others wait, so that
    reading the model does not overload a file system; `recovery.start_timeout_s` counts from each one's
    turn."""
    max_model_len: PositiveInt | None = None
    """Maximum length of prompt plus response in tokens; default: longest prompt + `sampling.max_tokens`."""
    colocated: bool = False
    """Generators and Learner share the devices and take turns (synchronous runs only)."""
    slowdown_s: NonNegativeFloat = 0.0
    """Artificial delay per group in seconds, for experiments with schedules."""


class DistillationConfig(EngineConfig):
    """On-policy distillation: a teacher judges every token of the policy's responses. Used if `teacher` is set.
    With `engine: torch`, micro-batches are `learner.micro_batch_tokens` long."""

    _other_fields: ClassVar[Mapping[str, str]] = {
        "generator.": "distillation.",
        "model.path": "distillation.teacher",
    }

    engine: Literal["vllm", "torch"] = "vllm"
    """Engine that scores."""
    teacher: HomePath | None = None
    """Teacher model: a folder in Hugging Face format, such as a checkpoint of a run, or a hub name. It must
    have the policy's vocabulary; code shipped with it is never run."""
    coefficient: PositiveFloat = 1.0
    """Factor of log(teacher / policy), which is added to each token's advantage."""
    max_gap: PositiveFloat = 10.0
    """Largest |log(teacher / policy)| of a token, in nats."""
    use_reward: bool = True
    """Add the rewards' advantages to the teacher's; if false, rewards are only measured."""
    num_teachers: PositiveInt = 1
    """Teacher actors, each with its own engine."""
