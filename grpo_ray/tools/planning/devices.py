"""Every device of a configuration, and what it would hold."""

from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.budget import Budget, Item
from grpo_ray.tools.planning.generator_memory import (
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    cpu_cache_budget,
    generator_budget,
)
from grpo_ray.tools.planning.host_memory import host_budget
from grpo_ray.tools.planning.learner_memory import (
    micro_batch_tokens,
    optimizer_temporaries,
    served_width,
    state_items,
    working_items,
)
from grpo_ray.tools.planning.model_shape import ModelShape

ALLOCATOR_SLACK = 0.1  # assumed: what CUDA's caching allocator keeps in pieces, of a micro-batch


@dataclass(frozen=True)
class Hardware:
    num_gpus: int
    gpu_bytes: float
    """Of each."""
    host_bytes: float | None
    """None: not known, so the host is not judged."""


def device_budgets(shape: ModelShape, config: Config, hardware: Hardware, prompt_tokens: int) -> list[Budget]:
    """Generators, Learner and the host, in this order; vLLM on a CPU has its KV cache judged alone."""
    budgets = []
    if config.generator.num_gpus:
        beside = _left_by_learner(shape, config) if config.generator.colocated else []
        budgets.append(generator_budget(shape, config, prompt_tokens, hardware.gpu_bytes, beside))
    elif config.generator.engine == "vllm":
        budgets.append(cpu_cache_budget(shape, config, prompt_tokens))
    if config.learner.num_gpus:
        budgets.append(learner_budget(shape, config, prompt_tokens, hardware.gpu_bytes))
    return [*budgets, host_budget(shape, config, prompt_tokens, hardware.host_bytes)]


def learner_budget(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> Budget:
    """The Learner's GPU, at the fullest of a micro-batch and AdamW's step."""
    working = working_items(shape, config, micro_batch_tokens(config, prompt_tokens))
    slack = ALLOCATOR_SLACK * sum(item.num_bytes for item in working)
    working.append(Item("allocator's slack", slack, f"assumed: {ALLOCATOR_SLACK:.0%} of a micro-batch"))
    stepping = optimizer_temporaries(shape)
    if stepping > sum(item.num_bytes for item in working):
        working = [
            Item("AdamW's temporaries", stepping, "more than a micro-batch takes, and not at the same time")
        ]
    items = [*state_items(shape, config), *working, Item("CUDA context", CONTEXT_BYTES, "assumed")]
    if config.weight_sync.transport == "ipc":
        items.append(_snapshot(shape, config))
    if not config.generator.colocated:
        return Budget("Learner", "the Learner's GPU", items, gpu_bytes)
    asleep = CONTEXT_BYTES + (0 if config.generator.enforce_eager else GRAPHS_BYTES)
    items.append(Item("vLLM asleep", asleep, "assumed"))
    return Budget("Learner", "the GPU, in the Learner's turn", items, gpu_bytes)


def _left_by_learner(shape: ModelShape, config: Config) -> list[Item]:
    """In the Generator's turn its state is on the host; a snapshot to be read in place stays."""
    context = Item("the Learner's CUDA context", CONTEXT_BYTES)
    return [context, _snapshot(shape, config)] if config.weight_sync.transport == "ipc" else [context]


def _snapshot(shape: ModelShape, config: Config) -> Item:
    return Item("snapshot", served_width(config) * shape.num_parameters, "weight_sync.transport: ipc")
