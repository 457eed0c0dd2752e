"""What a Generator holds on a GPU: vLLM's weights and workspace, and the KV cache that the rest is given to."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.budget import GIB, Budget, Item, gib
from grpo_ray.tools.planning.learner_memory import FLOAT32, served_width
from grpo_ray.tools.planning.model_shape import ModelShape

# Assumed, not measured: nothing here has run on a GPU.
CONTEXT_BYTES = (
    1 * GIB
)  # of a process that computes on a GPU: CUDA's context, its libraries' kernels and workspaces
GRAPHS_BYTES = 1 * GIB  # vLLM's CUDA graphs
BATCHED_TOKENS = 2048  # vLLM's default for an engine that is embedded: tokens of one forward pass
SAMPLER_COPIES = (
    4  # of the float32 logits of a token a sequence: as they are, scaled, as log-probabilities, sampled
)


@dataclass(frozen=True)
class KVDemand:
    """The KV cache in numbers of one GPU."""

    bytes_per_token: float
    max_model_len: int
    num_wanted: int
    """Sequences that would run at a time, were there room."""

    @property
    def bytes_per_sequence(self) -> float:
        return self.bytes_per_token * self.max_model_len

    @property
    def wanted_bytes(self) -> float:
        return self.bytes_per_sequence * self.num_wanted


def kv_demand(shape: ModelShape, config: Config, prompt_tokens: int) -> KVDemand:
    """Every running sequence at its full length.

    A token takes 2 x layers x key-value heads x head size values (Kwon et al. 2023, PagedAttention, section 1).
    With tensor parallelism each GPU has its share of the heads, one at least.
    """
    generator, algorithm = config.generator, config.algorithm
    heads_here = max(1, shape.num_kv_heads // max(1, generator.num_gpus))
    bytes_per_token = served_width(config) * shape.cached_per_token * heads_here / shape.num_kv_heads
    groups = (1 + config.weight_sync.max_lag) * config.fresh_per_step + config.num_oversampled
    in_flight = -(-groups * algorithm.samples_per_prompt // generator.num_generators)
    length = generator.max_model_len or prompt_tokens + config.sampling.max_tokens
    return KVDemand(bytes_per_token, length, min(generator.max_num_seqs, in_flight))


def generator_budget(
    shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float, beside: Sequence[Item] = ()
) -> Budget:
    """One GPU of a Generator: vLLM takes its whole `generator.gpu_memory_utilization`, or refuses to start.

    Args:
        beside: what the Learner leaves on the GPU in the Generator's turn.
    """
    demand = kv_demand(shape, config, prompt_tokens)
    fixed = _vllm_items(shape, config) if config.generator.engine == "vllm" else _torch_items(shape, config)
    share = config.generator.gpu_memory_utilization if config.generator.engine == "vllm" else 1.0
    allowed = min(share * gpu_bytes, gpu_bytes - sum(item.num_bytes for item in beside))
    left = allowed - sum(item.num_bytes for item in fixed)
    num_fit = int(max(0.0, left) // demand.bytes_per_sequence)
    cache = Item(
        "KV cache",
        max(demand.bytes_per_sequence, min(left, demand.wanted_bytes)),
        f"{demand.bytes_per_token / 1024:.0f} KiB a token, sequences of {demand.max_model_len:,}",
    )
    remark = _remark(demand, num_fit)
    return Budget("Generator", _device(config), [*fixed, cache], allowed, (remark,))


def cpu_cache_budget(shape: ModelShape, config: Config, prompt_tokens: int) -> Budget:
    """Whether one sequence finds room in a CPU's KV cache, whose size is configured."""
    demand, size = kv_demand(shape, config, prompt_tokens), config.generator.kv_cache_gib * GIB
    one = Item("one sequence", demand.bytes_per_sequence, f"of {demand.max_model_len:,} tokens")
    remark = _remark(demand, int(size // demand.bytes_per_sequence))
    return Budget("Generator", "a Generator's KV cache (generator.kv_cache_gib)", [one], size, (remark,))


def _device(config: Config) -> str:
    generator = config.generator
    if generator.colocated:
        return "the GPU, in the Generator's turn"
    num_gpus = generator.num_generators * generator.num_gpus
    whose = "the Generator's GPU" if num_gpus == 1 else f"each of the Generators' {num_gpus} GPUs"
    return f"{whose} (generator.gpu_memory_utilization {generator.gpu_memory_utilization:g})"


def _vllm_items(shape: ModelShape, config: Config) -> list[Item]:
    """Weights are divided among the GPUs of a Generator; each also has its process's own."""
    num_gpus, width = max(1, config.generator.num_gpus), served_width(config)
    hidden = BATCHED_TOKENS * (4 * shape.hidden_size + 3 * shape.intermediate_size / num_gpus) * width
    sampler = SAMPLER_COPIES * FLOAT32 * config.generator.max_num_seqs * shape.vocab_size
    items = [
        Item("weights", width * shape.num_parameters / num_gpus, config.model.dtype),
        Item("a forward pass, and the sampler", hidden + sampler, f"{config.generator.max_num_seqs} sequences"),
        Item("CUDA context", CONTEXT_BYTES, "assumed"),
    ]
    if not config.generator.enforce_eager:
        items.append(Item("CUDA graphs", GRAPHS_BYTES, "assumed"))
    return items


def _torch_items(shape: ModelShape, config: Config) -> list[Item]:
    """Its cache grows by copies, which the demand leaves out."""
    return [
        Item("weights", served_width(config) * shape.num_parameters, config.model.dtype),
        Item("CUDA context", CONTEXT_BYTES, "assumed"),
    ]


def _remark(demand: KVDemand, num_fit: int) -> str:
    if not num_fit:
        return (
            f"no sequence of {demand.max_model_len:,} tokens finds room in the KV cache "
            f"({gib(demand.bytes_per_sequence)}): the engine would refuse to start"
        )
    if num_fit < demand.num_wanted:
        return (
            f"{num_fit:,} of the {demand.num_wanted:,} sequences that could run at a time have room at full "
            "length; vLLM interrupts others when it runs out, and computes them again"
        )
    return f"room for {num_fit:,} sequences at full length; {demand.num_wanted:,} run at a time at most"
