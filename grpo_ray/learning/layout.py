"""The layout of micro-batches: packed with shared prompts where that gives the same log-probabilities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed import DistError

from grpo_ray.config import Config, SamplingConfig
from grpo_ray.learning.attention import BlockAttention, make_varlen, tree_obstacle
from grpo_ray.learning.families import SegmentTree
from grpo_ray.learning.log_probs import ResponseLogProbs, has_plain_output_layer
from grpo_ray.learning.microbatch import MicroBatch, collate_packed, collate_padded
from grpo_ray.learning.policy_model import Float32Head, PolicyModel, TreeAttention
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.objectives import token_log_probs

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Root mean square of the difference of a response's log-probabilities, in nats, that rounding explains."""
LOGIT = 32.0
"""Rounding is in proportion to the largest logit, and that grows in training: the tolerance is for this one."""

PLAIN = SamplingConfig(min_tokens=0)

MakeAttention = Callable[[SegmentTree], TreeAttention]


@dataclass(frozen=True)
class Layout:
    """One way to lay out micro-batches and to compute their log-probabilities."""

    log_probs: ResponseLogProbs
    make_attention: MakeAttention | None  # of the packed layout, by `kernel`; None: this is the padded one
    kernel: str = "sdpa"

    @property
    def shares_prompts(self) -> bool:
        return self.make_attention is not None

    def collate(self, sequences: Sequence[TrainSequence]) -> MicroBatch:
        """Make one micro-batch of the sequences."""
        if self.make_attention is None:
            return collate_padded(sequences)
        return collate_packed(sequences, self.make_attention)


def choose_layout(
    model: PolicyModel, config: Config, end_token_ids: tuple[int, ...], ranks: Ranks | None = None
) -> tuple[Layout, dict[str, str]]:
    """Return the best layout that gives the model's own log-probabilities, tried on a few tokens.

    Also return what the run's events should say of it, by their kind: the reason that it does not share
    prompts, unless the configuration says so, and on a GPU that `sdpa` computes attention.

    Raises:
        ValueError: none does, on every rank; or the model computes no float32 logits with `model.head_dtype`;
            or the kernel that `model.attention` names does not compute them.
    """
    sampling, ranks = config.sampling, ranks or Ranks()
    dtype = getattr(torch, config.model.dtype)
    is_chunked = has_plain_output_layer(model)
    padded = Layout(ResponseLogProbs(sampling, end_token_ids, is_chunked), None)
    reason = _difference(model, padded, ranks, dtype)
    if reason is not None and is_chunked:
        padded.log_probs.is_chunked = False
        reason = _difference(model, padded, ranks, dtype)
    if reason is not None:
        raise ValueError(
            f"model.path: {_name(model)} cannot be trained in padded rows: {reason}; use another model"
        )
    notes = {"attention_kernel": "sdpa computes attention"} if model.device.type == "cuda" else {}
    if config.learner.share_prompts == "never":
        return padded, notes
    reason = tree_obstacle(model)
    if reason is not None:
        return padded, notes | {"prompts_not_shared": reason}
    if varlen := make_varlen(config.model.attention, config.model.dtype, model.device):
        kernel, make_attention = varlen
        layout = Layout(padded.log_probs, make_attention, kernel)
        reason = _difference(model, layout, ranks, dtype)
        if reason is None:
            return layout, {}
        if config.model.attention != "auto":
            raise ValueError(f"model.attention: {kernel} cannot be used: {reason}; use `auto` or `sdpa`")
        notes = {"attention_kernel": f"sdpa computes attention, as {kernel} cannot be used: {reason}"}
    layout = Layout(padded.log_probs, BlockAttention.of)
    reason = _difference(model, layout, ranks, dtype)
    return (layout, notes) if reason is None else (padded, notes | {"prompts_not_shared": reason})


@torch.no_grad()
def _difference(model: PolicyModel, layout: Layout, ranks: Ranks, dtype: torch.dtype) -> str | None:
    """Return how the layout's log-probabilities differ from the model's own on a few tokens, or None.

    All ranks do as many passes, whatever they find, and return what the first of them found.

    Args:
        dtype: of the hidden states; logits are in the same unless the output layer is in float32.
    """
    output = model.get_output_embeddings()
    is_float32 = isinstance(output, Float32Head)
    sequences = _a_few_sequences(output.weight.shape[0])
    reason: str | None = None
    found = torch.empty(0)
    try:
        batch = layout.collate(sequences).to(model.device)
        log_probs = ResponseLogProbs(PLAIN, (), layout.log_probs.is_chunked)
        found = ranks.forward(model, log_probs, model, batch)[0]
    except (torch.OutOfMemoryError, DistError):
        raise
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = f"its forward pass fails there ({type(error).__name__}: {error})"
        ranks.end_lookup(model)
    for row, sequence in enumerate(sequences):
        response = torch.from_numpy(sequence.response_token_ids).long()
        tokens = torch.cat([torch.tensor(sequence.prompt_token_ids), response])[None].to(model.device)
        # Without the last token, which none of these may depend on.
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits[:, -len(response) :]
        if is_float32 and logits.dtype != torch.float32:
            raise ValueError(
                f"model.head_dtype: {_name(model)} computes logits in {logits.dtype} whatever its output layer "
                "does; set it to model"
            )
        own = token_log_probs(logits, tokens[:, -len(response) :])[0]
        if reason is None and own.isfinite().all():  # weights that are not finite say nothing about a layout
            difference = float((found[row, : len(response)] - own).square().mean().sqrt())
            tolerance = TOLERANCE.get(dtype if is_float32 else logits.dtype, 0.3)
            if not difference <= tolerance * max(1.0, float(logits.abs().max()) / LOGIT):
                reason = f"its log-probabilities would differ there by {difference:.2g}"
    ranks.end_lookup(model)
    return next(filter(None, ranks.gathered(reason)), None)


def _name(model: PolicyModel) -> str:
    return type(model).__name__.removeprefix("FSDP")


def _a_few_sequences(vocab: int) -> list[TrainSequence]:
    """Return two sequences with one prompt and one with another, of random tokens and different lengths."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, vocab, length).tolist()) for length in (7, 4)]
    return [
        TrainSequence(prompts[prompt], rng.integers(0, vocab, length), np.zeros(length, np.float32), 1.0)
        for prompt, length in ((0, 5), (0, 3), (1, 6))
    ]
