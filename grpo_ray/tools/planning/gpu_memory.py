"""The GPU memory of a Learner and of a Generator, item by item, against the memory that there is.

The Learner's counts are of the tensors that actors/learner.py and policy/forward_backward.py make; the tests
compare them with what torch allocates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.model_shape import ModelShape

GIB = 2**30
FLOAT32 = 4
# compute_entropy holds the logits, their log-probabilities, those clamped, their exponentials and the product;
# the backward pass needs no more. An entropy bonus keeps one more.
LOGITS_COPIES, LOGITS_COPIES_OF_ENTROPY_BONUS = 5, 6


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
    capacity_bytes: float | None
    """None: unknown, so there is no verdict."""
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

    @property
    def largest(self) -> Item:
        return max(self.items, key=lambda item: item.num_bytes)


def gib(num_bytes: float) -> str:
    """Return `12.3 GiB`, or MiB below one."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


# ---- the Learner ----


def learner_budget(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> Budget:
    """Return the budget of the Learner's GPU at the peak of a micro-batch or of AdamW's step."""
    working = working_items(shape, config, prompt_tokens)
    # On a GPU, torch.optim.AdamW updates all tensors at once (`foreach`), which by its documentation takes
    # about the size of the parameters more; on a CPU it updates one by one.
    stepping = FLOAT32 * shape.num_parameters if config.learner.num_gpus else 0
    if stepping > sum(item.num_bytes for item in working):
        working = [Item("AdamW's temporaries", stepping, "more than a micro-batch, and not at the same time")]
    items = [*state_items(shape, config), *working, *snapshot_in_place(shape, config)]
    if not config.learner.num_gpus:
        return Budget("the Learner, on a CPU", items, None)
    device = "the GPU, in the Learner's turn" if config.generator.colocated else "the Learner's GPU"
    return Budget(device, items, gpu_bytes)


def served_width(config: Config) -> int:
    """Return the bytes per value in `model.dtype`."""
    return FLOAT32 if config.model.dtype == "float32" else 2


def state_items(shape: ModelShape, config: Config) -> list[Item]:
    """Return the memory that lasts from step to step."""
    parameters, reference = shape.num_parameters, config.algorithm.kl.reference
    items = [
        Item("weights", FLOAT32 * parameters, "float32 master weights, 4 bytes per parameter"),
        Item("gradients", FLOAT32 * parameters, "float32"),
        Item("AdamW's moments", 2 * FLOAT32 * parameters, "two, float32"),
    ]
    if reference != "none":
        width = FLOAT32 if reference == "ema" else served_width(config)  # as policy/reference.py keeps them
        items.append(Item("reference", width * parameters, f"algorithm.kl.reference: {reference}"))
    return items


def snapshot_in_place(shape: ModelShape, config: Config) -> list[Item]:
    """Return the copy of the weights that a colocated Generator reads on the GPU, with the transport `ipc`."""
    if config.weight_sync.transport != "ipc":
        return []
    return [Item("snapshot", served_width(config) * shape.num_parameters, "weight_sync.transport: ipc")]


def micro_batch_tokens(config: Config, prompt_tokens: int) -> tuple[int, int]:
    """Return the largest micro-batch: all its tokens, and those of its responses."""
    longest = prompt_tokens + config.sampling.max_tokens
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    most = min(max(config.learner.micro_batch_tokens, longest), num_sequences * longest)
    return most, -(-most * config.sampling.max_tokens // longest)


def kept_per_token(shape: ModelShape, config: Config) -> int:
    """Return the bytes per token that one layer keeps for its backward pass.

    The count follows Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1), for RMSNorm,
    SwiGLU and attention that keeps no scores, with a float32 residual stream: norms keep their input and what
    they scale; matrices and attention keep their inputs, under autocast as one copy per matrix.
    """
    h, q, kv, i = shape.hidden_size, shape.query_width, shape.kv_width, shape.intermediate_size
    width = served_width(config)
    norms, normed = 2 * 2 * FLOAT32 * h, (2 if width == FLOAT32 else 5) * width * h
    attention = 2 * width * (q + kv)
    if config.model.implementation == "grpo_ray":  # repeats keys and values per head, keeps the mix twice
        attention = 5 * width * q
    if shape.has_qk_norm:
        attention += (2 * FLOAT32 if width == FLOAT32 else FLOAT32 + width) * (q + kv)
    statistics = FLOAT32 * (2 + shape.num_heads)
    return norms + normed + attention + 4 * width * i + statistics


def working_items(shape: ModelShape, config: Config, prompt_tokens: int) -> list[Item]:
    """Return the peak of the largest micro-batch's forward and backward pass."""
    num_tokens, num_response = micro_batch_tokens(config, prompt_tokens)
    width, layers = served_width(config), shape.num_layers
    copies = LOGITS_COPIES_OF_ENTROPY_BONUS if config.algorithm.entropy_bonus else LOGITS_COPIES
    one_copy = num_response * shape.vocab_size
    logits = f"{copies} float32 copies of {num_response:,} x {shape.vocab_size:,}"
    cast = 0 if width == FLOAT32 else width  # bytes per matrix value that autocast copies in the forward pass
    if not config.learner.gradient_checkpointing:
        last = 3 * FLOAT32 * shape.hidden_size  # the last norm, and the output layer's input
        kept = num_tokens * (layers * kept_per_token(shape, config) + last)
        items = [
            Item("activations", kept, f"of {num_tokens:,} tokens in {layers} layers"),
            Item("logits", copies * FLOAT32 * one_copy, logits),
            Item("weights cast by autocast", cast * shape.matrices, config.model.dtype),
        ]
        return [item for item in items if item.num_bytes]
    # Only the layers' inputs are kept (Chen et al. 2016); one of three peaks comes on top.
    layer = kept_per_token(shape, config) + 2 * width * shape.intermediate_size  # the gradients of gate and up
    cast_note = "at the end of the forward pass, with the first logits"
    peaks = [
        Item("logits", copies * FLOAT32 * one_copy + cast * shape.embedding, logits),
        Item("one layer recomputed", num_tokens * layer + cast * shape.layer_matrices, "with its gradients"),
        Item("weights cast by autocast", cast * shape.matrices + (FLOAT32 + cast) * one_copy, cast_note),
    ]
    if not cast:
        peaks.pop()
    kept = FLOAT32 * num_tokens * shape.hidden_size * layers
    inputs = Item("activations", kept, f"the inputs of {layers} layers, of {num_tokens:,} tokens")
    return [inputs, max(peaks, key=lambda item: item.num_bytes)]


# ---- a Generator ----


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
