"""Sequences that branch, as a tree of segments in which each token stands once; and kernels for it."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders import ENDS, TinyModel, changed, plain_logprobs
from hypothesis import given
from hypothesis import strategies as st
from test_shared_prompts import plain_kernel
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ray.config import Config, SamplingConfig
from grpo_ray.learning import layout
from grpo_ray.learning.attention import BlockAttention, VarlenAttention, _torch_kernel
from grpo_ray.learning.families import SegmentTree, families_of, segments_of
from grpo_ray.learning.layout import Layout, choose_layout
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.log_probs import ResponseLogProbs
from grpo_ray.learning.microbatch import collate_packed, collate_padded
from grpo_ray.learning.sequences import TrainSequence, lengths_of, plan
from grpo_ray.objectives import chunked_log_probs
from grpo_ray.watch.flops import num_pairs, num_tokens


def sequence(prompt: list[int], response: list[int], group: int = 0, number: int = 0) -> TrainSequence:
    values = np.zeros(len(response), np.float32)
    return TrainSequence(tuple(prompt), np.array(response, np.int32), values, 1.0, sample=(group, number))


def all_paths(sequences: list[TrainSequence]) -> set[tuple[int, ...]]:
    """Return every distinct beginning: one per token of the smallest tree."""
    return {tuple(s.tokens(0, end).tolist()) for s in sequences for end in range(1, len(s) + 1)}


def depth(tree: SegmentTree) -> int:
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 if parent == -1 else depths[parent] + 1)
    return max(depths)


def test_branches_of_an_episode_by_hand() -> None:
    sequences = [
        sequence([1, 2], [3, 4, 5, 6]),
        sequence([1, 2, 3, 4, 7], [8]),  # leaves the first within its response
        sequence([1, 9], [3]),  # and within its prompt
        sequence([1, 2], [3, 4, 7, 8, 2]),  # goes on behind the second
        sequence([1], [2], group=1),  # groups share nothing
    ]
    tree, tokens, last = segments_of(sequences)
    assert [segment.tolist() for segment in tokens] == [[1], [2, 3, 4], [5, 6], [7, 8], [2], [9, 3], [1, 2]]
    assert tree == SegmentTree((1, 3, 2, 2, 1, 2, 2), (-1, 0, 1, 1, 3, 0, -1))
    assert last == [2, 3, 5, 4, 6]
    assert depth(tree) == 4
    assert lengths_of(sequences) == [(0, 6, 4), (4, 6, 1), (6, 7, 5), (1, 3, 1), (0, 2, 1)]
    assert plan(sequences, 13, shares_prompts=True) == [[0, 1, 3, 2, 4]]
    assert plan(sequences, 11, shares_prompts=True) == [[0, 1, 3, 2], [4]]
    assert plan(sequences, 8, shares_prompts=True) == [[0, 1], [3], [2, 4]]


tokens_st = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(tokens_st, tokens_st, st.integers(0, 1)), min_size=1, max_size=9),
    budget=st.integers(1, 40),
)
def test_trees_hold_each_beginning_once_and_every_sequence_as_a_path(
    rows: list[tuple[list[int], list[int], int]], budget: int
) -> None:
    sequences = [sequence(prompt, response, group, n) for n, (prompt, response, group) in enumerate(rows)]
    tree, tokens, last = segments_of(sequences)
    row = np.concatenate(tokens)
    assert min(tree.lengths) > 0
    for s, segment in zip(sequences, last, strict=True):
        assert row[tree.paths[segment]].tolist() == s.tokens().tolist()
    least = most = 0
    for group in (0, 1):
        own = [s for s in sequences if s.sample is not None and s.sample[0] == group]
        least = max(least, len(all_paths(own)))
        most += sum(map(len, {s.prompt_token_ids for s in own})) + sum(len(s.response_token_ids) for s in own)
    assert least <= tree.num_tokens <= most
    members = [member for family in families_of(sequences) for member in family]
    assert tree.num_tokens == sum(len(sequences[index]) - overlap for index, overlap in members)
    lengths = lengths_of(sequences)
    assert num_tokens(lengths) == tree.num_tokens
    assert num_pairs(lengths) == int((tree.positions() + 1).sum())
    for shares in (True, False):
        planned = plan(sequences, budget, shares)
        assert sorted(index for indices in planned for index in indices) == list(range(len(sequences)))
        for indices in planned:
            chosen = [sequences[index] for index in indices]
            batch = collate_packed(chosen, BlockAttention.of) if shares else collate_padded(chosen)
            assert batch.input_ids.numel() <= budget or len(indices) == 1


def test_a_conversation_is_the_smallest_tree() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = [rng.integers(0, 2, 9).tolist()]
        for number in range(5):  # each leaves an earlier one anywhere; tokens above 9 tell the branches apart
            earlier = rows[int(rng.integers(len(rows)))]
            rows.append(earlier[: int(rng.integers(1, len(earlier)))] + [10 + number] * int(rng.integers(1, 6)))
        cuts = [min(number + 1, len(row) - 1) for number, row in enumerate(rows)]
        sequences = [sequence(row[:cut], row[cut:]) for row, cut in zip(rows, cuts, strict=True)]
        if len({s.prompt_token_ids for s in sequences}) == len(rows):
            assert segments_of(sequences)[0].num_tokens == len(all_paths(sequences))


@pytest.mark.parametrize("is_varlen", [False, True])
@pytest.mark.parametrize("is_own", [False, True])
def test_deep_trees_have_each_sequences_logprobs(tiny_model: TinyModel, is_own: bool, is_varlen: bool) -> None:
    path = str(tiny_model(False, own=True)) if is_own else str(tiny_model())
    model = load_policy(path, implementation="grpo_ray" if is_own else "transformers")
    rng = np.random.default_rng(1)
    history, sequences = rng.integers(20, 280, 5).tolist(), []
    for number in range(7):  # each branch goes on from within the one before it
        reply = rng.integers(20, 280, 6).tolist()
        sequences.append(sequence(history, reply, number=number))
        history = history + reply[: int(rng.integers(2, 5))] + rng.integers(20, 280, 2).tolist()
    tree, _, _ = segments_of(sequences)
    assert depth(tree) == 7
    attention = (lambda tree: VarlenAttention.of(tree, plain_kernel)) if is_varlen else BlockAttention.of
    layout = Layout(ResponseLogProbs(SamplingConfig(min_tokens=0), ENDS), attention)
    with torch.no_grad():
        found, _ = layout.log_probs(model, layout.collate(sequences))
        for row, s in zip(found, sequences, strict=True):
            expected = plain_logprobs(model, s.prompt_token_ids, s.response_token_ids.tolist())
            torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)


def test_short_segments_in_bfloat16_are_computed_in_float32_on_a_cpu() -> None:
    tree = SegmentTree((3, 1, 4, 2), (-1, 0, 1, 1))
    torch.manual_seed(0)
    states = [torch.randn(tree.num_tokens, heads, 8).bfloat16() for heads in (4, 2, 2)]
    attention = BlockAttention.of(tree)
    assert torch.equal(attention(*states), attention(*(x.float() for x in states)).bfloat16())


def test_a_path_may_have_thousands_of_segments() -> None:
    assert SegmentTree((1,) * 5000, tuple(range(-1, 4999))).paths[4999].tolist() == list(range(5000))


# ---- kernels of FlashAttention run on GPUs alone: here, how one is chosen, named and fed ----


def use(monkeypatch: pytest.MonkeyPatch, make_attention: Callable[[SegmentTree], Any]) -> None:
    monkeypatch.setattr(layout, "make_varlen", lambda *_: ("varlen", make_attention))


def test_a_kernel_is_named_and_one_that_fails_is_replaced_unless_it_was_asked_for(
    tiny_model: TinyModel, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(tiny_model()))
    use(monkeypatch, BlockAttention.of)  # it computes the same
    chosen, notes = choose_layout(policy, tiny_config, ())
    assert (chosen.kernel, notes) == ("varlen", {})
    use(monkeypatch, Mock(side_effect=TypeError("varlen_attn() got an unexpected keyword argument")))
    chosen, notes = choose_layout(policy, tiny_config, ())
    assert (chosen.kernel, chosen.shares_prompts) == ("sdpa", True)
    said = "sdpa computes attention, as varlen cannot be used: its forward pass fails there (TypeError"
    assert notes["attention_kernel"].startswith(said)
    on_gpu = {"learner": {"num_gpus": 1}, "generator": {"num_gpus": 1}}
    config = changed(tiny_config, model={"attention": "varlen", "dtype": "bfloat16"}, **on_gpu)
    with pytest.raises(ValueError, match=r"model.attention: varlen cannot be used: .* use `auto` or `sdpa`"):
        choose_layout(policy, config, ())


@pytest.mark.parametrize("has_gqa", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_torchs_kernel_gets_the_arguments_that_it_has(has_gqa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def later(q: Tensor, *_: Any, scale: Any, window_size: Any, enable_gqa: bool = False) -> Tensor:
        found.update(scale=scale, window_size=window_size, enable_gqa=enable_gqa)
        return q

    def earlier(q: Tensor, *_: Any, scale: Any, window_size: Any) -> Tensor:
        found.update(scale=scale, window_size=window_size)
        return q

    monkeypatch.setattr(varlen, "varlen_attn", later if has_gqa else earlier)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    queries, keys = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    assert _torch_kernel(queries, keys, keys, ends, ends, 3, 3, 0.5) is queries
    assert found == {"scale": 0.5, "window_size": (-1, 0)} | ({"enable_gqa": True} if has_gqa else {})


def test_every_tensor_of_a_micro_batch_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not would be copied to the GPU by a copy that waits for all that the GPU has to do."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.to("meta"))
    responses = (torch.arange(2).numpy(), torch.arange(4).numpy())
    sequences = [TrainSequence((5, 6, 7), r, torch.zeros(len(r)).numpy(), 1.0) for r in responses]
    batch = collate_packed(sequences, BlockAttention.of).pinned()
    assert isinstance(batch.attention, BlockAttention)
    blocks = [t for b in batch.attention.blocks for t in (b.queries, b.keys, b.is_allowed)]
    tensors = [value for value in (*vars(batch).values(), *blocks) if isinstance(value, Tensor)]
    assert len(tensors) > 10
    assert all(tensor.is_meta for tensor in (*tensors, batch.attention.places))


def test_the_head_indexes_with_no_list() -> None:
    """torch copies an index that is a list to the GPU, and waits there for all that was begun before."""
    names: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    with Noting():
        log_probs, entropy = chunked_log_probs(
            hidden, weight, torch.arange(12), 0.7, (3, 5), torch.arange(12) < 6, chunk_bytes=4 * 40 * 5
        )
        (log_probs + entropy).sum().backward()
    assert any(name.startswith("aten.masked_fill_") for name in names)
    blocking = ("aten.index.", "aten.index_put", "aten.lift_fresh", "aten._local_scalar_dense", "aten.nonzero")
    assert [name for name in names if name.startswith(blocking)] == []
