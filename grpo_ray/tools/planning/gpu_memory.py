"""A device's memory item by item against what there is, and the budget of a Generator's GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_ray.config import Config
from grpo_ray.tools.planning.model_shape import ModelShape

GIB = 2**30
FLOAT32 = 4
ENGINE_BYTES, CONTEXT_BYTES = 2 * GIB, 1 * GIB
"""Memory of vLLM beside weights and cache (CUDA's context and graphs, a prefill, float32 logits), also asleep;
and of a Learner beside its tensors. Both are estimates: none was measured."""


@dataclass(frozen=True)
class Item:
    """Bytes in use at the device's peak; `note` says how they are counted."""

    name: str
    num_bytes: float
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """One device."""

    device: str
    items: Sequence[Item]
    capacity_bytes: float | None  # None: unknown, so there is no verdict
    remark: str = ""

    @property
    def needed_bytes(self) -> float:
        return sum(item.num_bytes for item in self.items)

    @property
    def missing_bytes(self) -> float:
        """Bytes beyond the capacity; 0 where everything fits."""
        return 0.0 if self.capacity_bytes is None else max(0.0, self.needed_bytes - self.capacity_bytes)

    @property
    def fits(self) -> bool:
        return self.missing_bytes < 1  # below one byte is rounding, where vLLM's cache takes all that is left


def gib(num_bytes: float) -> str:
    """Return `12.3 GiB`, or MiB below one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def served_width(config: Config) -> int:
    """Return the bytes per value in `model.dtype`."""
    return FLOAT32 if config.model.dtype == "float32" else 2


def snapshots(shape: ModelShape, config: Config) -> list[Item]:
    """Return the copies of the weights on the Learner's GPU: with `nccl` the current and the next ones.

    With `ipc` it is one, which the colocated Generator reads there.
    """
    sync, num_bytes = config.weight_sync, served_width(config) * shape.num_parameters
    if sync.transport == "ipc":
        return [Item("snapshot", num_bytes, "weight_sync.transport: ipc")]
    if sync.wire_backend == "nccl":
        return [Item("snapshots", 2 * num_bytes, "2 copies, weight_sync.transport: nccl")]
    return []


def generator_budget(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> Budget:
    """Return the budget of one GPU of a Generator; on a CPU, of its configured KV cache."""
    generator = config.generator
    length = generator.max_model_len or prompt_tokens + config.sampling.max_tokens
    sequence, wanted = length * kv_bytes_per_token(shape, config), concurrent_sequences(config)
    weights_bytes = served_width(config) * shape.num_parameters / max(1, generator.num_gpus)
    weights = Item("weights", weights_bytes, config.model.dtype)
    if not generator.num_gpus and generator.engine == "vllm":
        assert generator.kv_cache_gib is not None, "it has a default on a CPU"
        size, one = generator.kv_cache_gib * GIB, Item("one sequence", sequence, f"of {length:,} tokens")
        return Budget("the Generator's KV cache, on a CPU", [one], size, _room(size, sequence, wanted))
    if not generator.num_gpus:
        return Budget("the Generator, on a CPU", [weights, Item("KV cache", wanted * sequence)], None)
    share, device = 1.0, "the GPU, in the Generator's turn" if generator.colocated else "a Generator's GPU"
    items, note = [weights], f"{sequence / length / 1024:.0f} KiB per token, sequences of {length:,}"
    if generator.engine == "vllm":
        share = generator.gpu_memory_utilization
        device += f" (generator.gpu_memory_utilization {share:g})"
        items.append(Item("vLLM's own", ENGINE_BYTES, "estimated: CUDA graphs, activations, logits"))
    left = share * gpu_bytes - sum(item.num_bytes for item in items)
    if generator.kv_cache_gib is not None:
        left = min(left, generator.kv_cache_gib * GIB)
    if not generator.colocated or generator.engine != "vllm":
        cache_bytes = max(sequence, min(left, wanted * sequence))  # it makes do with what is left
        cache = Item("KV cache", cache_bytes, note)
        return Budget(device, [*items, cache], share * gpu_bytes, _room(left, sequence, wanted))
    items.append(Item("KV cache", max(sequence, left), f"{note}; all that its share leaves"))
    items += [*snapshots(shape, config), Item("the Learner's context", CONTEXT_BYTES, "estimated")]
    budget = Budget(device, items, gpu_bytes, _room(left, sequence, wanted))
    if budget.fits:
        return budget
    largest = math.floor(100 * (share - budget.missing_bytes / gpu_bytes)) / 100
    has_room = largest * gpu_bytes > weights_bytes
    advice = f"generator.gpu_memory_utilization: {largest:.2f}" if has_room else "no share"
    return replace(budget, remark=f"{budget.remark}; {advice} leaves room for the rest")


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
