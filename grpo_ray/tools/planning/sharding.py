"""The Learner's sharding over ranks (FSDP2): shards, and the whole tensors that a rank holds for a moment."""

from grpo_ray.config import Config
from grpo_ray.tools.planning.gpu_memory import FLOAT32, Item, served_width
from grpo_ray.tools.planning.model_shape import ModelShape

GATHERED_BLOCKS = 3  # the one at work, the next one, and the buffer that the next one is gathered into


def num_shards(config: Config) -> int:
    """Return the number of ranks that hold one copy of the weights between them."""
    return config.learner.num_ranks // config.learner.replicas


def root_parameters(shape: ModelShape) -> int:
    """Return the number of values in the group outside of the blocks: embeddings, norm and output layer."""
    return shape.embedding * (1 if shape.is_tied else 2) + shape.hidden_size


def block_parameters(shape: ModelShape) -> int:
    return (shape.num_parameters - root_parameters(shape)) // shape.num_layers


def sharded_parameters(shape: ModelShape, config: Config, adapter_parameters: int) -> tuple[int, int]:
    """Return the number of values that ranks gather, and of those with a gradient that they reduce."""
    if config.model.adapter is None:
        return shape.num_parameters, shape.num_parameters
    base = (
        0 if config.model.base_quantization == "nf4" else shape.num_parameters
    )  # an nf4 base is whole everywhere
    return base + adapter_parameters, adapter_parameters


def with_unsharded(
    working: list[Item], shape: ModelShape, config: Config, adapter_parameters: int
) -> list[Item]:
    """Return the working memory of a pass with what a rank holds whole: gathered weights, unreduced gradients.

    The root's weights stay gathered during a pass, beside the shard that was cast for it, and the gradient of
    the output layer until the embeddings have theirs; a block is resharded after its forward and its backward
    pass. A gradient in `model.dtype` is reduced from a float32 copy into a float32 shard, while the copy of the
    block before it is not freed yet. Where the reduction of the root's gradient takes more than all that came
    before it, the peak is there, after the activations are gone. tests/tools/test_planning_ranks.py compares.
    """
    if config.learner.num_ranks == 1:
        return working
    width, shards = served_width(config), num_shards(config)
    of_adapter = adapter_parameters // shape.num_layers
    is_frozen, is_whole = config.model.adapter is not None, config.model.base_quantization == "nf4"
    root = 0 if is_whole else root_parameters(shape)
    block = of_adapter + (0 if is_whole else block_parameters(shape))
    trained, output = (of_adapter, 0) if is_frozen else (block, shape.embedding)
    reduced = width + FLOAT32 + FLOAT32 / shards  # bytes per value: the gradient, its copy, its shard
    of_root = width * root * (1 + 1 / shards)
    note = f"{config.model.dtype}: embeddings, norm and output layer, "
    in_pass = [
        Item(
            "gathered weights",
            of_root + GATHERED_BLOCKS * width * block,
            f"{note}the block at work and the next",
        ),
        Item(
            "unreduced gradients",
            width * output + (reduced + FLOAT32) * trained,
            f"of {'' if is_frozen else 'the output layer and of '}the blocks being reduced",
        ),
        *working,
    ]
    at_end = [
        Item("gathered weights", of_root, note.rstrip(", ")),
        Item("unreduced gradients", reduced * root + FLOAT32 * block, "of the same, after the backward pass"),
    ]
    return (
        in_pass if is_frozen else max(in_pass, at_end, key=lambda items: sum(item.num_bytes for item in items))
    )
