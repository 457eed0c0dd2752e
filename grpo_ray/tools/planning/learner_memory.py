"""The memory of the Learner's device, item by item.

The counts are of the tensors that core/learner.py and learning/forward_backward.py make; the tests compare them
with what torch allocates.
"""

from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.gpu_memory import (
    CONTEXT_BYTES,
    ENGINE_BYTES,
    FLOAT32,
    Budget,
    Item,
    gib,
    served_width,
    snapshots,
)
from grpo_ray.tools.planning.model_shape import ModelShape

CHUNK_BYTES, COMPILED_CHUNK_BYTES = 2**28, 2**30
"""Bytes of float32 logits that objectives/chunked.py, which imports torch, computes at a time."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight: 4 bits, an 8-bit scale per 64 weights, and a float32 scale per 256 of those."""
GATHERED_BLOCKS = 3  # the one at work, the next one, and the buffer that the next one is gathered into
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}


@dataclass(frozen=True)
class Tokens:
    """The largest micro-batch."""

    all: int
    responses: int  # tokens of responses, at which the output layer is applied
    keys: int  # keys that attention gathers: those of a response's prompt again for each response


def learner_budget(shape: ModelShape, config: Config, prompt_tokens: int, gpu_bytes: float) -> Budget:
    """Return the budget of a rank's GPU at the peak of a micro-batch; AdamW's step takes nothing more."""
    working = with_unsharded(working_items(shape, config, prompt_tokens), shape, config)
    items = [*state_items(shape, config), *working, *snapshots(shape, config)]
    if config.learner.num_gpus:
        items.append(Item("CUDA's context", CONTEXT_BYTES, "estimated"))
        if config.generator.colocated and config.generator.engine == "vllm":
            items.append(Item("the sleeping vLLM", ENGINE_BYTES, "estimated"))
    num_ranks, capacity_bytes = config.learner.num_ranks, gpu_bytes if config.learner.num_gpus else None
    if capacity_bytes is None:
        one, several = "the Learner, on a CPU", f"each of the Learner's {num_ranks} ranks, on a CPU"
    elif config.generator.colocated:
        one, several = "the GPU, in the Learner's turn", "each GPU, in the Learner's turn"
    else:
        one, several = "the Learner's GPU", f"the GPU of each of the Learner's {num_ranks} ranks"
    return Budget(one if num_ranks == 1 else several, items, capacity_bytes, host_remark(shape, config))


def host_remark(shape: ModelShape, config: Config) -> str:
    """Return the host memory of copies of the weights and of the state, page-locked where there is a GPU."""
    learner, generator, sync = config.learner, config.generator, config.weight_sync
    if learner.num_ranks == 1 and not learner.num_gpus:
        return ""
    sent, trained = sent_bytes(shape, config), trained_parameters(shape, config)
    saved = (FLOAT32 + 2 * MOMENT_BYTES[learner.moments]) * trained / num_shards(config)
    parts = {"checkpoints": saved}
    if learner.num_gpus and generator.colocated:
        gradients = FLOAT32 * trained / num_shards(config)  # which are freed
        parts["the Generators' turn"] = sum(i.num_bytes for i in state_items(shape, config)) - gradients
    if sync.transport != "ipc" and sync.wire_backend != "nccl":
        copies = 1 + (sync.wire_backend is not None) + sync.delta  # see transfer/sender.py
        parts["a snapshot" if copies == 1 else f"{copies} snapshots"] = copies * sent
        parts["each Generator's copy"] = sent if generator.num_gpus else 0.0
    if learner.num_ranks > 1:
        dtype = "float32" if config.model.adapter is None else config.model.dtype
        parts[f"loading in {dtype}, on rank 0"] = (FLOAT32 if dtype == "float32" else 2) * shape.num_parameters
    listed = ", ".join(f"{gib(num_bytes)} for {what}" for what, num_bytes in parts.items() if num_bytes)
    return f"host memory: {listed}"


def sent_bytes(shape: ModelShape, config: Config) -> float:
    """Return the bytes of a snapshot."""
    if config.model.adapter is not None and config.weight_sync.send == "adapter":
        return served_width(config) * shape.adapter_parameters(config.model.adapter)
    return served_width(config) * shape.num_parameters


def state_items(shape: ModelShape, config: Config) -> list[Item]:
    """Return the memory that lasts from step to step: with several ranks, one rank's shards.

    An adapter's reference is a second set of its values, which share the base.
    """
    adapter, width, moments = config.model.adapter, served_width(config), config.learner.moments
    num_trained = trained_parameters(shape, config)
    trained, moment_bytes = num_trained / num_shards(config), 2 * MOMENT_BYTES[moments]
    is_sharded = config.learner.num_ranks > 1  # then a bfloat16 copy exists only of the layers at work
    copy = 0 if width == FLOAT32 or is_sharded else width  # per value, as learning/master_weights.py holds it
    if adapter is None:
        items = [
            Item("weights", FLOAT32 * trained, "float32 master weights, 4 bytes per parameter"),
            Item("copy of the weights", copy * trained, f"{config.model.dtype}, for the passes"),
            Item("gradients", FLOAT32 * trained, "float32"),
            Item("AdamW's moments", moment_bytes * trained, f"two, {moments}"),
        ]
    else:
        note = f"rank {adapter.rank}, {num_trained:,} parameters: weights, gradients and AdamW's moments"
        items = [_base(shape, config), Item("adapter", (2 * FLOAT32 + copy + moment_bytes) * trained, note)]
    if (reference := config.algorithm.kl.reference) != "none":
        # A frozen one has no float32 weights, a moving average has them beside its copy.
        own = width if reference == "initial" else FLOAT32 + copy
        note = f"algorithm.kl.reference: {reference}{'' if adapter is None else ', on the same base'}"
        items.append(Item("reference", own * trained, note))
    return [item for item in items if item.num_bytes]


def _base(shape: ModelShape, config: Config) -> Item:
    """Return the frozen base of an adapter (learning/adapters.py); ranks shard all but one in nf4."""
    width, matrices, dtype = served_width(config), shape.num_layers * shape.layer_matrices, config.model.dtype
    if config.model.base_quantization != "nf4":
        return Item("base", width * shape.num_parameters / num_shards(config), f"frozen, {dtype}")
    others = width * (shape.num_parameters - matrices)
    return Item("base", NF4_BYTES * matrices + others, f"frozen; linear layers in nf4, the rest in {dtype}")


def largest_micro_batch(config: Config, prompt_tokens: int) -> Tokens:
    """Return the largest micro-batch of responses of full length: with shared prompts one prompt per group."""
    longest, per_prompt = prompt_tokens + config.sampling.max_tokens, responses_per_prompt(config)
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    of_group = prompt_tokens + per_prompt * config.sampling.max_tokens
    most = min(max(config.learner.micro_batch_tokens, longest), round(num_sequences * of_group / per_prompt))
    num_groups = max(1.0, most / of_group)  # a group that is too large is split, and keeps one prompt
    responses = most - round(num_groups * prompt_tokens)
    again = responses / config.sampling.max_tokens if config.learner.share_prompts == "auto" else 0
    return Tokens(most, responses, most + round(again * prompt_tokens) if again else most)


def responses_per_prompt(config: Config) -> float:
    """Return the number of responses that a prompt is computed once for: a group's with shared prompts."""
    if config.learner.share_prompts == "never":
        return 1.0
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    dealt = config.algorithm.samples_per_prompt * num_sequences / config.rollouts_per_step
    return max(1.0, dealt)  # minibatches deal a group's responses out


def kept_per_token(shape: ModelShape, config: Config, tokens: Tokens) -> float:
    """Return the bytes per token that one layer keeps for its backward pass.

    The count follows Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1), for RMSNorm in
    float32, SwiGLU and attention that keeps no scores: norms keep their input and what they scale; matrices and
    attention keep their inputs. Over shared prompts attention gathers the keys and values of each response's
    prompt; without a kernel for that, it also gathers queries and results and, on a GPU, repeats keys per head.
    """
    h, q, kv, i = shape.hidden_size, shape.query_width, shape.kv_width, shape.intermediate_size
    width, keys = served_width(config), tokens.keys / tokens.all
    model, has_gpu = config.model, config.learner.num_gpus > 0
    is_own, is_shared = model.implementation == "grpo_ray", config.learner.share_prompts == "auto"
    # For segments of any length (learning/attention.py).
    has_kernel = has_gpu and model.dtype == "bfloat16" and model.attention != "sdpa"
    norms, normed = 2 * (FLOAT32 + width) * h, 2 * width * h
    if is_shared and has_kernel:
        attention = width * (2 * q + 2 * kv * keys)
    elif is_shared:
        attention = width * (3 * q + 2 * keys * (q if has_gpu else kv))
    else:
        attention = width * (5 * q if is_own else 2 * q + 2 * kv)
    if is_shared and is_own:  # the rotation, which transformers computes once for all layers
        attention += 2 * FLOAT32 * shape.head_dim
    if shape.has_qk_norm:
        attention += (FLOAT32 + width) * (q + kv)
    statistics = FLOAT32 * (2 + shape.num_heads)
    return norms + normed + attention + 4 * width * i + statistics


def working_items(shape: ModelShape, config: Config, prompt_tokens: int) -> list[Item]:
    """Return the peak of the largest micro-batch's forward and backward pass."""
    tokens, width, layers = largest_micro_batch(config, prompt_tokens), served_width(config), shape.num_layers
    layer = kept = tokens.all * kept_per_token(shape, config, tokens)
    last = tokens.all * (FLOAT32 + width) * shape.hidden_size  # the last norm
    gradients = 2 * width * tokens.all * shape.intermediate_size  # of gate and up
    again = Item("one layer recomputed", layer + gradients, "with its gradients")
    which = config.learner.gradient_checkpointing
    if which == "full":  # the layers' inputs alone are kept (Chen et al. 2016)
        kept, note = width * shape.hidden_size * tokens.all, "the inputs of"
    elif which == "selective":
        kept, note = _kept_selectively(shape, width) * tokens.all, "inputs, matrix products and attention of"
    elif _is_compiled(config):  # by torch's partitioner: on an H100 it also kept what enters the last product
        kept = tokens.all * (_kept_selectively(shape, width) + width * shape.intermediate_size)
        note = "what the compiler keeps of"
    else:
        note = "of"
    if which == "none":
        again = Item("gradients of a layer", gradients, "of its activations")
    activations = Item("activations", layers * kept + last, f"{note} {layers} layers, of {tokens.all:,} tokens")
    return [activations, max(_output_layer(shape, config, tokens), again, key=lambda item: item.num_bytes)]


def _is_compiled(config: Config) -> bool:
    return config.learner.compile and config.learner.num_gpus > 0


def _kept_selectively(shape: ModelShape, width: int) -> int:
    """Return the bytes per token of a layer's input, its seven matrix products, and attention's results."""
    h, q, kv, i = shape.hidden_size, shape.query_width, shape.kv_width, shape.intermediate_size
    return width * (h + (q + 2 * kv + h) + (2 * i + h) + q) + FLOAT32 * shape.num_heads


def _output_layer(shape: ModelShape, config: Config, tokens: Tokens) -> Item:
    """Return the peak of objectives/chunked.py: a chunk's logits, and gradients of weights and inputs."""
    served, vocab = served_width(config), shape.vocab_size
    width = FLOAT32 if config.model.head_dtype == "float32" else served
    is_frozen = config.model.adapter is not None  # its weights have no gradient
    chunk_bytes = COMPILED_CHUNK_BYTES if _is_compiled(config) else CHUNK_BYTES
    rows = min(tokens.responses, max(1, chunk_bytes // (FLOAT32 * vocab)))
    weights = 0 if is_frozen else FLOAT32 * shape.embedding
    chunk, width_ratio = rows * FLOAT32 * vocab, width / FLOAT32
    # A chunk's logits and their gradient, with an entropy bonus two more of that size, else its cast.
    copies = 4.0 if config.algorithm.has_entropy_bonus else 2.0 if width == FLOAT32 else 2.0 + width_ratio
    copies = 2.0 * width_ratio if _is_compiled(config) else copies  # what is computed between is not written
    peak = copies * chunk + weights
    if width < FLOAT32:  # the weights' gradient is summed in float32, with one narrow term at a time
        peak = max(peak, (1 + width_ratio) * (chunk + weights))
    states = (served + width) * tokens.responses * shape.hidden_size
    if width > served:  # the weights and a chunk's states are cast
        peak += width * (shape.embedding + rows * shape.hidden_size)
    note = f"a chunk of {rows:,} x {vocab:,} logits{'' if is_frozen else ', and the gradient of its weights'}"
    return Item("output layer", peak + states, note)


# The sharding over ranks (FSDP2)


def num_shards(config: Config) -> int:
    """Return the number of ranks that hold one copy of the weights between them."""
    return config.learner.num_ranks // config.learner.replicas


def trained_parameters(shape: ModelShape, config: Config) -> int:
    """Return the number of values with a gradient."""
    adapter = config.model.adapter
    return shape.num_parameters if adapter is None else shape.adapter_parameters(adapter)


def gathered_parameters(shape: ModelShape, config: Config) -> int:
    """Return the number of values that ranks gather: all but an nf4 base, which is whole everywhere."""
    num_trained = trained_parameters(shape, config)
    is_frozen = config.model.adapter is not None and config.model.base_quantization != "nf4"
    return num_trained + (shape.num_parameters if is_frozen else 0)


def with_unsharded(working: list[Item], shape: ModelShape, config: Config) -> list[Item]:
    """Return the working memory of a pass with what a rank holds whole: gathered weights, unreduced gradients.

    The root's weights stay gathered during a pass, beside the shard that was cast for it, and the gradient of
    the output layer until the embeddings have theirs; a block is resharded after its forward and its backward
    pass. A gradient in `model.dtype` is reduced from a float32 copy into a float32 shard, while the copy of the
    block before it is not freed yet. Where the reduction of the root's gradient takes more than all that came
    before it, the peak is there, after the activations are gone. tests/tools/test_planning.py compares.
    """
    if config.learner.num_ranks == 1:
        return working
    width, shards = served_width(config), num_shards(config)
    of_adapter = shape.adapter_parameters(config.model.adapter) // shape.num_layers
    is_frozen, is_whole = config.model.adapter is not None, config.model.base_quantization == "nf4"
    root = 0 if is_whole else shape.root_parameters
    block = of_adapter + (0 if is_whole else shape.block_parameters)
    trained, output = (of_adapter, 0) if is_frozen else (block, shape.embedding)
    reduced = width + FLOAT32 + FLOAT32 / shards  # bytes per value: the gradient, its copy, its shard
    of_root = width * root * (1 + 1 / shards)
    gathered, unreduced = "gathered weights", "unreduced gradients"
    note = f"{config.model.dtype}: embeddings, norm and output layer"
    layers = "the blocks being reduced" if is_frozen else "the output layer and of the blocks being reduced"
    in_pass = [
        Item(gathered, of_root + GATHERED_BLOCKS * width * block, f"{note}, the block at work and the next"),
        Item(unreduced, width * output + (reduced + FLOAT32) * trained, f"of {layers}"),
        *working,
    ]
    if is_frozen:
        return in_pass
    at_end = [
        Item(gathered, of_root, note),
        Item(unreduced, reduced * root + FLOAT32 * block, "of the same, after the backward pass"),
    ]
    return max(in_pass, at_end, key=lambda items: sum(item.num_bytes for item in items))
