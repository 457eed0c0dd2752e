"""Packing sequences of many lengths into micro-batches, and the cost of padding."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import model_folder
from benchmarks.turns import take_turns
from grpo_ray.learning.attention import BlockAttention
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.log_probs import model_inputs
from grpo_ray.learning.microbatch import MicroBatch, collate_packed, collate_padded
from grpo_ray.learning.sequences import TrainSequence, plan

TITLE = "micro-batches of sequences of different lengths: order, padding, a forward pass"
OURS, PADDED = "packed, without padding (ours)", "padded, longest first"


def make_sequences(num_sequences: int, longest: int) -> list[TrainSequence]:
    """Make sequences with prompts of 12 tokens and, as in real policies, log-normal response lengths."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(longest / 6), 0.9, num_sequences), 1, longest).astype(int)
    return [
        TrainSequence(
            tuple(rng.integers(20, 300, 12).tolist()),
            rng.integers(20, 300, length).astype(np.int32),
            np.zeros(length, np.float32),
            1.0,
        )
        for length in lengths
    ]


def in_order(sequences: Sequence[TrainSequence], max_tokens: int) -> Iterable[MicroBatch]:
    """Pack in order of arrival, each micro-batch as full as possible."""
    pending: list[TrainSequence] = []
    for sequence in sequences:
        if pending and (len(pending) + 1) * max(map(len, [*pending, sequence])) > max_tokens:
            yield collate_padded(pending)
            pending = []
        pending.append(sequence)
    yield collate_padded(pending)


def planned(sequences: Sequence[TrainSequence], max_tokens: int, is_packed: bool) -> Iterable[MicroBatch]:
    """Pack as the Learner does, with `learner.share_prompts: auto` or `never`."""
    for indices in plan(sequences, max_tokens, is_packed):
        chosen = [sequences[index] for index in indices]
        yield collate_packed(chosen, BlockAttention.of) if is_packed else collate_padded(chosen)


WAYS: dict[str, Callable[[Sequence[TrainSequence], int], Iterable[MicroBatch]]] = {
    OURS: lambda sequences, max_tokens: planned(sequences, max_tokens, is_packed=True),
    PADDED: lambda sequences, max_tokens: planned(sequences, max_tokens, is_packed=False),
    "padded, in the order they come": in_order,
    "one at a time": lambda sequences, _: (collate_padded([sequence]) for sequence in sequences),
}


def run(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    sequences = make_sequences(16 if options.quick else 256, 32 if options.quick else 256)
    max_tokens = 256 if options.quick else 4096
    tokens = sum(map(len, sequences))
    with model_folder() as folder:
        model = load_policy(folder)

    @torch.no_grad()
    def forward(batches: Iterable[MicroBatch]) -> None:
        for batch in batches:
            model.base_model(**model_inputs(batch))

    cases: dict[str, Callable[[], object]] = {}
    padding: dict[str, float] = {}
    for name, cut in WAYS.items():
        batches = list(cut(sequences, max_tokens))
        padding[name] = 1 - tokens / sum(batch.input_ids.numel() for batch in batches)
        cases[name] = lambda cut=cut: forward(cut(sequences, max_tokens))
    cutting = f"{OURS}, the cutting alone"
    cases[cutting] = lambda: list(planned(sequences, max_tokens, is_packed=True))
    seconds = take_turns(cases, options.rounds or (2 if options.quick else 6))
    return [
        Row(name, values, PADDED, tokens, "tokens", {"padding": padding[name]} if name in padding else {})
        for name, values in seconds.items()
    ]
