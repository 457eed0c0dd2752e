"""A Generator's memory: its weights, and the KV cache that gets what they leave."""

from grpo_ray.config import Config
from grpo_ray.tools.planning.budget import GIB, Budget, Item
from grpo_ray.tools.planning.learner_memory import served_width, snapshot_in_place
from grpo_ray.tools.planning.model_shape import ModelShape


def generator_budget(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> Budget:
    """Return the budget of one GPU of a Generator; on a CPU, of its configured KV cache."""
    generator = config.generator
    length = generator.max_model_len or prompt_tokens + config.sampling.max_tokens
    sequence, wanted = length * kv_bytes_per_token(shape, config), concurrent_sequences(config)
    weights_bytes = served_width(config) * shape.num_parameters / max(1, generator.num_gpus)
    weights = Item("weights", weights_bytes, config.model.dtype)
    if not generator.num_gpus and generator.engine == "vllm":
        size, one = generator.kv_cache_gib * GIB, Item("one sequence", sequence, f"of {length:,} tokens")
        return Budget("the Generator's KV cache, on a CPU", [one], size, _room(size, sequence, wanted))
    if not generator.num_gpus:
        return Budget("the Generator, on a CPU", [weights, Item("KV cache", wanted * sequence)], None)
    share, device = 1.0, "the GPU, in the Generator's turn" if generator.colocated else "a Generator's GPU"
    if generator.engine == "vllm":
        share = generator.gpu_memory_utilization
        device += f" (generator.gpu_memory_utilization {share:g})"
    snapshot = sum(item.num_bytes for item in snapshot_in_place(shape, config))
    allowed = min(share * gpu_bytes, gpu_bytes - snapshot)
    left = allowed - weights_bytes
    note = f"{sequence / length / 1024:.0f} KiB per token, sequences of {length:,}"
    cache_bytes = max(sequence, min(left, wanted * sequence))  # vLLM makes do with what is left
    items = [weights, Item("KV cache", cache_bytes, note)]
    return Budget(device, items, allowed, _room(left, sequence, wanted))


def kv_bytes_per_token(shape: ModelShape, config: Config) -> float:
    """Return the KV cache's bytes per token on one GPU: a key and a value per layer and key-value head.

    That is the count of Kwon et al. 2023 (PagedAttention, section 1). With tensor parallelism each GPU holds
    its share of the heads, and at least one.
    """
    heads_here = max(1, shape.num_kv_heads // max(1, config.generator.num_gpus))
    return served_width(config) * 2 * shape.num_layers * heads_here * shape.head_dim


def concurrent_sequences(config: Config) -> int:
    """Return the largest number of sequences that a Generator runs at a time, given room in its cache."""
    groups = (1 + config.weight_sync.max_lag) * config.fresh_per_step + config.num_oversampled
    in_flight = -(-groups * config.algorithm.samples_per_prompt // config.generator.num_generators)
    return min(config.generator.max_num_seqs, in_flight)


def _room(left: float, sequence: float, wanted: int) -> str:
    num_fit = int(max(0.0, left) // sequence)
    if not num_fit:
        return "the KV cache has no room for one sequence: the engine would refuse to start"
    if num_fit < wanted:
        return (
            f"KV cache: room for {num_fit:,} of up to {wanted:,} concurrent sequences at full length; vLLM "
            "preempts and recomputes the others"
        )
    return f"KV cache: room for all {wanted:,} concurrent sequences at full length"
