"""A step's seconds on one GPU from data sheets: what the Generators sample, and what the Learner computes.

The operations are counted as in watch/flops.py, which imports torch, and with recomputation. The assumed
shares of the peaks are in hardware.py.
"""

from dataclasses import dataclass
from math import ceil

from grpo_ray.config import Config
from grpo_ray.tools.planning.gpu_memory import (
    FLOAT32,
    GIB,
    concurrent_sequences,
    generator_budget,
    kv_bytes_per_token,
    served_width,
)
from grpo_ray.tools.planning.hardware import (
    ALL_REDUCE_S,
    ENGINE_STEP_S,
    MEMORY_UTILIZATION,
    SAMPLING_UTILIZATION,
    TRAINING_UTILIZATION,
    GpuType,
)
from grpo_ray.tools.planning.learner_memory import MOMENT_BYTES, adapter_parameters
from grpo_ray.tools.planning.model_shape import ModelShape
from grpo_ray.tools.planning.sharding import num_shards

UPDATE_VALUES = 5
"""Float32 values per parameter that an update reads and writes besides the moments: the gradient for its norm,
again for the update, and when it is cleared; the weight twice."""


@dataclass(frozen=True)
class Workload:
    """The model, and the lengths of its sequences."""

    shape: ModelShape
    prompt_tokens: int
    """Length of the longest prompt, which the estimate takes for all."""
    response_tokens: float
    """Mean length of a response."""


@dataclass(frozen=True)
class Passes:
    """Seconds of a step's passes on one GPU, without communication."""

    forward_s: float
    backward_s: float
    """With the recomputed activations."""
    lookup_s: float = 0.0
    """Forward passes alone: of a reference, or of the policy before the first of several updates."""


def passes_on(gpu: GpuType, config: Config, work: Workload) -> Passes:
    """Return the seconds of a step's passes on one GPU; every response is taken to have a gradient."""
    blocks, output = forward_flops(config, work)
    epochs, rate = config.algorithm.epochs_per_batch, TRAINING_UTILIZATION * gpu.flops(config.model.dtype)
    times = 1 if config.model.adapter is not None else 2  # frozen weights pass a gradient on and have none
    again = blocks if config.learner.gradient_checkpointing == "full" else 0.0
    return Passes(
        forward_s=epochs * (blocks + output) / rate,
        backward_s=epochs * (times * (blocks + output) + again) / rate,
        lookup_s=num_lookups(config) * (blocks + output) / rate,
    )


def num_lookups(config: Config) -> int:
    """Return how often a step passes its batch forward only, to look log-probabilities up."""
    algorithm = config.algorithm
    is_proximal = algorithm.old_log_probs == "proximal" or bool(algorithm.corrections)
    looks_up = algorithm.token_selection != "none" or (is_proximal and config.num_updates > 1)
    return looks_up + (algorithm.kl.reference != "none")


def forward_flops(config: Config, work: Workload) -> tuple[float, float]:
    """Return the operations of a forward pass over a step's batch: in the blocks, and in the output layer."""
    shape, prompt, response = work.shape, work.prompt_tokens, work.response_tokens
    rollouts, per_prompt = config.rollouts_per_step, prompts_per_response(config)
    pairs = per_prompt * prompt**2 / 2 + prompt * response + response**2 / 2
    tokens = rollouts * (per_prompt * prompt + response)
    matrices = shape.num_layers * shape.layer_matrices
    attention = 4 * shape.num_layers * shape.query_width * pairs * rollouts
    return 2 * matrices * tokens + attention, 2 * shape.embedding * rollouts * response


def prompts_per_response(config: Config) -> float:
    """Return the number of times that a prompt is computed per response: once per group with shared prompts."""
    if config.learner.share_prompts == "never":
        return 1.0
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    per_prompt = config.algorithm.samples_per_prompt * num_sequences / config.rollouts_per_step
    return 1 / max(1.0, per_prompt)  # minibatches deal a group's responses out


def num_micro_batches(config: Config, work: Workload) -> int:
    """Return the number of micro-batches per update that one rank computes: as many as every other rank."""
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    of_sequence = prompts_per_response(config) * work.prompt_tokens + work.response_tokens
    in_micro_batch = max(1.0, config.learner.micro_batch_tokens / of_sequence)  # lengths differ, and fill it
    return ceil(num_sequences / (in_micro_batch * config.learner.num_ranks))


def optimizer_s(gpu: GpuType, config: Config, shape: ModelShape) -> float:
    """Return the seconds of one update of AdamW, which the memory's bandwidth limits."""
    adapter = config.model.adapter
    trained = shape.num_parameters if adapter is None else adapter_parameters(shape, adapter)
    num_bytes = FLOAT32 * UPDATE_VALUES + 4 * MOMENT_BYTES[config.learner.moments]  # two moments, twice each
    return trained / num_shards(config) * num_bytes / (MEMORY_UTILIZATION * gpu.bandwidth)


def sampling_s(gpu: GpuType, config: Config, work: Workload) -> float:
    """Return the seconds in which all Generators together sample a step's fresh responses.

    An engine's step reads its weights and the cached keys and values of its sequences, and computes one token
    of each; a prompt is computed once per group. Sequences are on average half done.
    """
    generator, samples = config.generator, config.algorithm.samples_per_prompt
    groups = config.fresh_per_step / generator.num_generators
    prefill_s = groups * 2 * work.shape.num_parameters * work.prompt_tokens / _engine_flops(gpu, config)
    running, step_s = decoding(gpu, config, work)
    return prefill_s + groups * samples * work.response_tokens * step_s / running


def decoding(gpu: GpuType, config: Config, work: Workload) -> tuple[int, float]:
    """Return the number of sequences that an engine decodes at a time, and the seconds of one of its steps."""
    shape, num_gpus = work.shape, max(1, config.generator.num_gpus)
    context = work.prompt_tokens + work.response_tokens / 2
    cached = context * kv_bytes_per_token(shape, config)
    weights = served_width(config) * shape.num_parameters / num_gpus
    budget = generator_budget(shape, config, work.prompt_tokens, gpu.memory_gib * GIB)
    room = max(0.0, (budget.capacity_bytes or 0.0) - weights)
    running = int(max(1, min(concurrent_sequences(config), room // cached)))
    read_s = (weights + running * cached) / (MEMORY_UTILIZATION * gpu.bandwidth)
    compute_s = running * 2 * shape.num_parameters / _engine_flops(gpu, config)
    latency_s = 2 * shape.num_layers * ALL_REDUCE_S if num_gpus > 1 else 0.0
    return running, max(read_s, compute_s) + latency_s + ENGINE_STEP_S


def _engine_flops(gpu: GpuType, config: Config) -> float:
    return SAMPLING_UTILIZATION * gpu.flops(config.model.dtype) * max(1, config.generator.num_gpus)
