"""What the Learner holds: the training's state, and what one micro-batch takes beside it.

The counts are of the tensors that actors/learner.py and policy/forward_backward.py make; the tests compare them
with what torch allocates. P is the number of parameters, T the micro-batch's tokens, R its response positions
(padding included), V the vocabulary, h the hidden size.
"""

from dataclasses import dataclass

from grpo_ray.config import Config
from grpo_ray.tools.planning.budget import Item
from grpo_ray.tools.planning.model_shape import ModelShape

FLOAT32 = 4
# compute_entropy holds the logits, their log-probabilities, those clamped, their exponentials and the product;
# the backward pass no more. With an entropy bonus one more is kept for it.
LOGITS_COPIES, LOGITS_COPIES_OF_ENTROPY_BONUS = 5, 6


@dataclass(frozen=True)
class MicroBatchTokens:
    """The most of one micro-batch: T, and those of its positions that go through the output layer, R."""

    all: int
    response: int


def served_width(config: Config) -> int:
    """Bytes of a value in `model.dtype`."""
    return FLOAT32 if config.model.dtype == "float32" else 2


def micro_batch_tokens(config: Config, prompt_tokens: int) -> MicroBatchTokens:
    """Of responses of any length up to `sampling.max_tokens`, all after prompts of `prompt_tokens`."""
    longest = prompt_tokens + config.sampling.max_tokens
    num_sequences = config.algorithm.train_batch_size or config.rollouts_per_step
    most = min(max(config.learner.micro_batch_tokens, longest), num_sequences * longest)
    return MicroBatchTokens(most, -(-most * config.sampling.max_tokens // longest))


def kept_per_token(shape: ModelShape, config: Config) -> int:
    """Bytes that one layer keeps of a token for its backward pass.

    As Korthikanti et al. 2022 (Reducing Activation Recomputation, section 4.1) count them, for RMSNorm, SwiGLU
    and attention that keeps no scores, with a float32 residual stream: norms keep their input and what they
    scale; matrices and attention their inputs. Under autocast those are copied, once for each matrix.
    """
    h, q, kv, i = shape.hidden_size, shape.query_width, shape.kv_width, shape.intermediate_size
    width = served_width(config)
    norms, normed = 2 * 2 * FLOAT32 * h, (2 if width == FLOAT32 else 5) * width * h
    attention = 2 * width * (q + kv)
    if config.model.implementation == "grpo_ray":  # repeats keys and values for each head, keeps the mix twice
        attention = 5 * width * q
    if shape.has_qk_norm:
        attention += (2 * FLOAT32 if width == FLOAT32 else FLOAT32 + width) * (q + kv)
    statistics = FLOAT32 * (2 + shape.num_heads)
    return norms + normed + attention + 4 * width * i + statistics


def state_items(shape: ModelShape, config: Config) -> list[Item]:
    """What stays from step to step. The reference of `ema` is float32, as policy/reference.py has it."""
    parameters, kl = shape.num_parameters, config.algorithm.kl
    items = [
        Item("weights", FLOAT32 * parameters, "float32 master weights, 4 bytes a parameter"),
        Item("gradients", FLOAT32 * parameters, "float32"),
        Item("AdamW's moments", 2 * FLOAT32 * parameters, "two, float32"),
    ]
    if kl.reference != "none":
        width = FLOAT32 if kl.reference == "ema" else served_width(config)
        items.append(Item("reference", width * parameters, f"algorithm.kl.reference: {kl.reference}"))
    return items


def working_items(shape: ModelShape, config: Config, tokens: MicroBatchTokens) -> list[Item]:
    """What a micro-batch's forward and backward pass hold at their fullest."""
    copies = LOGITS_COPIES_OF_ENTROPY_BONUS if config.algorithm.entropy_bonus else LOGITS_COPIES
    one_copy = FLOAT32 * tokens.response * shape.vocab_size
    logits = Item(
        "logits", copies * one_copy, f"{copies} float32 copies of {tokens.response:,} x {shape.vocab_size:,}"
    )
    cast = 0 if served_width(config) == FLOAT32 else served_width(config)  # autocast's bytes a matrix value
    if config.learner.gradient_checkpointing:
        return _recomputing_items(shape, config, tokens, logits, cast)
    last = 3 * FLOAT32 * shape.hidden_size  # the last norm, and the output layer's input
    kept = tokens.all * (shape.num_layers * kept_per_token(shape, config) + last)
    items = [Item("activations", kept, f"of {tokens.all:,} tokens in {shape.num_layers} layers"), logits]
    if cast:
        items.append(Item("weights as autocast casts them", cast * shape.multiplied, config.model.dtype))
    return items


def _recomputing_items(
    shape: ModelShape, config: Config, tokens: MicroBatchTokens, logits: Item, cast: int
) -> list[Item]:
    """Layers keep their inputs alone (Chen et al. 2016); the fullest of three moments comes on top."""
    inputs = FLOAT32 * tokens.all * shape.hidden_size * shape.num_layers
    gradients = 2 * served_width(config) * shape.intermediate_size  # of gate's and up's results
    layer = tokens.all * (kept_per_token(shape, config) + gradients) + cast * shape.layer_matrices
    first_logits = (FLOAT32 + cast) * tokens.response * shape.vocab_size
    moments = [
        Item(logits.name, logits.num_bytes + cast * shape.embedding, logits.note),
        Item("a layer computed again", layer, "and its gradients"),
    ]
    if cast:  # autocast keeps every copy until the forward pass is over
        note = f"in {config.model.dtype}, as the forward pass ends, and the first logits"
        moments.append(Item("weights as autocast casts them", cast * shape.multiplied + first_logits, note))
    kept = Item("activations", inputs, f"each of {shape.num_layers} layers' input, of {tokens.all:,} tokens")
    return [kept, max(moments, key=lambda item: item.num_bytes)]


def optimizer_temporaries(shape: ModelShape) -> float:
    """Bytes beside state and gradients while AdamW steps on a GPU.

    torch.optim.AdamW goes through all tensors at once there (`foreach`), which takes about the size of the
    parameters more (its documentation says so); on a CPU it goes one by one.
    """
    return FLOAT32 * shape.num_parameters
