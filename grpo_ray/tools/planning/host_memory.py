"""What a run's processes hold in the host's memory: on a CPU everything, beside GPUs the copies of the weights.

The constants are resident memory, as `memory/*_bytes` of a run and `ps` count it: pages that processes share
count for each. docs/plan.md says how they were measured.
"""

from dataclasses import replace

from grpo_ray.config import Config
from grpo_ray.rewards import needs_isolation
from grpo_ray.tools.planning.budget import Budget, Item
from grpo_ray.tools.planning.generator_memory import kv_demand
from grpo_ray.tools.planning.learner_memory import (
    FLOAT32,
    micro_batch_tokens,
    served_width,
    state_items,
    working_items,
)
from grpo_ray.tools.planning.model_shape import ModelShape

MB = 10**6
DRIVER_BYTES = 625 * MB
WARMUP_BYTES = 190 * MB  # more in the driver that builds the tiny model
LEARNER_BYTES = 530 * MB  # with torch's optimizer loaded, and no model
VLLM_BYTES = 1750 * MB  # Generator and engine, two processes on a CPU, without KV cache, after 40 steps
TORCH_ENGINE_BYTES = 540 * MB
SCORER_BYTES, NURSERY_BYTES, WORKER_BYTES = 340 * MB, 77 * MB, 67 * MB
BUFFER_BYTES = 175 * MB
WEIGHT_SYNC_BYTES = 330 * MB  # Ray loads the Generator's class, and torch with it, for its handles
RAY_BYTES = 700 * MB  # its servers, agents and two idle workers
LIBRARIES = "libraries"
HEAP_SLACK = 0.6  # of what torch asks for in a micro-batch: glibc's heap keeps so much more in pieces


def host_budget(shape: ModelShape, config: Config, prompt_tokens: int, capacity_bytes: float | None) -> Budget:
    """All processes on one machine; None judges nothing."""
    processes = {
        "driver": _driver_items(config),
        "Learner": _learner_items(shape, config, prompt_tokens),
        "Generator": _generator_items(shape, config, prompt_tokens),
        "Scorer": [Item(LIBRARIES, _scorer_bytes(config))],
        "TrajectoryBuffer": [Item(LIBRARIES, BUFFER_BYTES)],
        "WeightSync": [Item(LIBRARIES, WEIGHT_SYNC_BYTES)],
        "Ray": [Item(LIBRARIES, RAY_BYTES, "of its own processes"), *_object_store_items(shape, config)],
    }
    items = [replace(item, process=process) for process, own in processes.items() for item in own]
    return Budget("host", "the host's memory", items, capacity_bytes)


def _driver_items(config: Config) -> list[Item]:
    items = [Item(LIBRARIES, DRIVER_BYTES)]
    if config.model.tiny is not None and config.model.tiny.warmup is not None:
        items.append(Item("warm-up", WARMUP_BYTES, "of the tiny model, unless it is cached"))
    return items


def _learner_items(shape: ModelShape, config: Config, prompt_tokens: int) -> list[Item]:
    items, state = [Item(LIBRARIES, LEARNER_BYTES)], state_items(shape, config)
    if not config.learner.num_gpus:
        working = working_items(shape, config, micro_batch_tokens(config, prompt_tokens))
        slack = HEAP_SLACK * sum(item.num_bytes for item in working)
        items += [*state, *working, Item("heap in pieces", slack, f"{HEAP_SLACK:.0%} of a micro-batch")]
    elif config.generator.colocated:
        away = sum(item.num_bytes for item in state if item.name != "gradients")
        items.append(Item("its state in the Generator's turn", away, "generator.colocated"))
    if config.weight_sync.transport != "ipc":
        items.append(Item("snapshot", served_width(config) * shape.num_parameters, config.model.dtype))
    kl, captured = config.algorithm.kl, 3 * FLOAT32 * shape.num_parameters
    if kl.reference == "ema":
        captured += FLOAT32 * shape.num_parameters
    elif kl.refresh_every_num_steps is not None:
        captured += served_width(config) * shape.num_parameters
    return [*items, Item("a checkpoint's copy", captured, "while it is written")]


def _generator_items(shape: ModelShape, config: Config, prompt_tokens: int) -> list[Item]:
    generator, weights = config.generator, served_width(config) * shape.num_parameters
    each = [Item(LIBRARIES, VLLM_BYTES if generator.engine == "vllm" else TORCH_ENGINE_BYTES)]
    if generator.engine == "vllm" and config.weight_sync.transport != "ipc":
        each.append(Item("snapshot", weights, "shared with its engine"))
    if not generator.num_gpus:
        each.append(Item("weights", weights, config.model.dtype))
        each.append(_kv_cache(shape, config, prompt_tokens))
    elif generator.colocated:
        each.append(Item("weights", weights, "while vLLM sleeps"))
    num = generator.num_generators
    times = f" x {num}" if num > 1 else ""
    return [replace(item, name=item.name + times, num_bytes=num * item.num_bytes) for item in each]


def _kv_cache(shape: ModelShape, config: Config, prompt_tokens: int) -> Item:
    """vLLM's is there from the start, whatever is in it."""
    if config.generator.engine == "vllm":
        return Item("KV cache", config.generator.kv_cache_gib * 2**30, "generator.kv_cache_gib")
    wanted = kv_demand(shape, config, prompt_tokens).wanted_bytes
    return Item("KV cache", wanted, "every sequence at full length")


def _scorer_bytes(config: Config) -> float:
    if not any(map(needs_isolation, config.task.rewards.values())):
        return SCORER_BYTES
    return SCORER_BYTES + NURSERY_BYTES + config.scorer.num_workers * WORKER_BYTES


def _object_store_items(shape: ModelShape, config: Config) -> list[Item]:
    if config.weight_sync.transport == "ipc":
        return []
    return [Item("snapshot", served_width(config) * shape.num_parameters, "in its object store")]
