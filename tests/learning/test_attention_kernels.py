"""Kernels of FlashAttention run on GPUs alone: here, how one is chosen, named and fed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import TinyModel, changed
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_ray.config import Config
from grpo_ray.learning import layout
from grpo_ray.learning.attention import BlockAttention, _torch_kernel
from grpo_ray.learning.families import SegmentTree
from grpo_ray.learning.layout import choose_layout
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.microbatch import collate_packed
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.objectives import chunked_log_probs


@pytest.fixture
def policy(tiny_model: TinyModel) -> PolicyModel:
    return load_policy(str(tiny_model()))


def failing(tree: SegmentTree) -> Any:
    raise TypeError("varlen_attn() got an unexpected keyword argument")


def use(monkeypatch: pytest.MonkeyPatch, make_attention: Callable[[SegmentTree], Any]) -> None:
    monkeypatch.setattr(layout, "make_varlen", lambda *_: ("varlen", make_attention))


def test_a_kernel_is_named_and_one_that_fails_is_replaced_unless_it_was_asked_for(
    policy: PolicyModel, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, BlockAttention.of)  # it computes the same
    chosen, notes = choose_layout(policy, tiny_config, ())
    assert (chosen.kernel, notes) == ("varlen", {})
    use(monkeypatch, failing)
    chosen, notes = choose_layout(policy, tiny_config, ())
    assert (chosen.kernel, chosen.shares_prompts) == ("sdpa", True)
    said = "sdpa computes attention, as varlen cannot be used: its forward pass fails there (TypeError"
    assert notes["attention_kernel"].startswith(said)
    config = changed(
        tiny_config, model={"attention": "varlen", "dtype": "bfloat16"}, learner={"num_gpus": 1},
        generator={"num_gpus": 1},
    )  # fmt: skip
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
