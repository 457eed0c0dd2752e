"""vLLM's arguments that a run decides itself, with the place where each can be set."""

from collections.abc import Iterable, Mapping

_ONE_ENGINE = "generator.num_gpus and generator.num_generators"
_DISTRIBUTION = "only the fields of sampling may shape the distribution, which the Learner reproduces"
_ONE_MODEL = "the Learner and the engine read the same model.path"

# By argument: the field to set instead, or the reason that there is none.
DECIDED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "hf_config_path"), "model.path"),
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "hf_overrides": f"model.head_dtype for its head_dtype, and nothing for others: {_ONE_MODEL}",
    "seed": "run.seed",
    "max_model_len": "generator.max_model_len",
    "max_num_seqs": "generator.max_num_seqs",
    "gpu_memory_utilization": "generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "generator.kv_cache_gib",
    "enforce_eager": "generator.enforce_eager",
    "enable_sleep_mode": "generator.colocated",
    "weight_transfer_config": "weight_sync.transport",
    "worker_extension_cls": "nothing: the workers' methods for weight syncs are there",
    "hf_token": "the environment variable HF_TOKEN",
    "tensor_parallel_size": "generator.num_gpus",
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size", "nnodes"), _ONE_ENGINE),
    **dict.fromkeys(("data_parallel_size", "data_parallel_size_local"), "generator.num_generators"),
    "device_ids": "nothing: Ray assigns the GPUs",
    "distributed_executor_backend": "nothing: one GPU runs in the engine's process, several in one each",
    "load_format": "nothing: weights are read from safetensors, never from a pickle",
    "skip_tokenizer_init": "nothing: stop strings need the tokenizer",
    "disable_log_stats": "nothing: the run reports its own metrics",
    **dict.fromkeys(("revision", "code_revision", "tokenizer_revision"), f"nothing: {_ONE_MODEL}"),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors", "watermark_config"),
        f"nothing: {_DISTRIBUTION}",
    ),
    "logprobs_mode": "nothing: behaviour logprobs are taken at the sampling temperature",
    "enable_lora": "nothing: the engine serves the whole policy, without adapters",
}


def refuse_decided(names: Iterable[str], other_fields: Mapping[str, str]) -> None:
    """Refuse arguments that the run decides.

    Args:
        other_fields: what stands in the place of these parts of DECIDED's fields.

    Raises:
        ValueError: names them all, and the fields to set instead.
    """
    problems = [f"{name} is decided by the run; set {DECIDED[name]}" for name in names if name in DECIDED]
    if problems:
        text = "; ".join(problems)
        for field, other in other_fields.items():
            text = text.replace(field, other)
        raise ValueError(text)
