"""Compiled blocks and recomputed activations: the same gradient, for both kinds of models."""

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import MakeLearner, gradient, make_batch, perturb, relative_difference, train_step
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from grpo_ray.config import LearnerConfig
from grpo_ray.core.learner import Learner
from grpo_ray.learning.policy_model import blocks_of, recompute_in_backward
from grpo_ray.learning.sequences import sequences_of


def accumulated(learner: Learner, batch: Any) -> torch.Tensor:
    learner.accumulate_gradient(sequences_of(batch))
    return gradient(learner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "which", "model"),
    [
        ("transformers", "full", {}), ("transformers", "selective", {"dtype": "bfloat16"}),
        ("grpo_ray", "full", {"dtype": "bfloat16"}), ("grpo_ray", "selective", {}),
        ("transformers", "selective", {"base_quantization": "nf4", "adapter": {"rank": 4}}),
    ],
)  # fmt: skip
def test_recomputing_keeps_gradients(make_learner: MakeLearner, family: str, which: str, model: dict) -> None:
    plain, recomputing = (
        make_learner(family=family, model=model, learner={"gradient_checkpointing": each})
        for each in ("none", which)
    )
    for each in (plain, recomputing):  # else an adapter has no effect
        perturb(torch.nn.ParameterList(p for p in each.model.parameters() if p.requires_grad), 3, 0.05)
    batch = make_batch(plain)
    assert torch.equal(accumulated(recomputing, batch), accumulated(plain, batch))


def test_recomputing_drops_no_value_and_blocks_are_found_in_any_layout() -> None:
    """Some drop values by a module, others by a function, with a rate that is an attribute or in the config."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    starcoder = Starcoder2Config(**sizes, intermediate_size=32, num_key_value_heads=1, embedding_dropout=0.5)
    opt = OPTConfig(**sizes, ffn_dim=32, word_embed_proj_dim=16, dropout=0.5)
    falcon = FalconForCausalLM(FalconConfig(**sizes, hidden_dropout=0.5, attention_dropout=0.5))
    models = Starcoder2ForCausalLM(starcoder), OPTForCausalLM(opt), GPT2LMHeadModel(GPT2Config(**sizes))
    for model in (*models, falcon):
        tokens = torch.arange(8)[None]
        model.eval()
        plain = model(input_ids=tokens).logits
        recompute_in_backward(model, "full")
        assert any(module.training for module in model.modules())
        assert torch.equal(model(input_ids=tokens).logits, plain)
        assert len(list(blocks_of(model))) == 2


@pytest.mark.parametrize("family", ["transformers", "grpo_ray"])
def test_selective_recomputes_the_cheap_operations_alone(make_learner: MakeLearner, family: str) -> None:
    products = {
        which: num_products(make_learner(family=family, learner={"gradient_checkpointing": which}))
        for which in ("none", "selective", "full")
    }
    assert products["none"] == products["selective"]
    with pytest.raises(ValueError, match="clip_qkv"):  # which changes kept values in place
        recompute_in_backward(SimpleNamespace(config=SimpleNamespace(clip_qkv=1.0)), "selective")
    # Of two blocks, `full` computes attention and seven products again, except the last one, which ends it.
    assert products["full"] - products["none"] == 2 * 7


class Products(TorchDispatchMode):
    """Counts matrix products and attention kernels that are computed."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += any(name in str(func) for name in ("aten.mm", "aten.addmm", "attention"))
        return func(*args, **(kwargs or {}))


def num_products(learner: Learner) -> int:
    """Count the products of a forward and a backward pass."""
    ids = torch.arange(20, 40)[None]
    with Products() as products:
        learner.model(ids, use_cache=False).logits.square().mean().backward()
    return products.number


def test_booleans_of_earlier_files_are_accepted() -> None:
    for given, expected in ((True, "full"), (False, "none"), ("selective", "selective")):
        assert LearnerConfig(gradient_checkpointing=given).gradient_checkpointing == expected


@pytest.mark.campaign
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize(("family", "which"), [("transformers", "none"), ("grpo_ray", "full")])
def test_compiled_blocks_have_the_same_gradient_and_names(
    make_learner: MakeLearner, family: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # set by a vLLM engine that was in this process
    torch._dynamo.reset()
    plain = make_learner(family=family)
    compiled = make_learner(family=family, learner={"compile": True, "gradient_checkpointing": which})
    assert compiled.masters.named.keys() == plain.masters.named.keys()
    assert compiled.model.state_dict().keys() == plain.model.state_dict().keys()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for seed in range(3):
        batch = make_batch(plain, seed=seed)
        assert relative_difference(accumulated(compiled, batch), accumulated(plain, batch)) < 1e-5
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 3  # batches of other shapes are not compiled again
    assert graphs[0] > 0
    assert compiled._forward_backward._layout.shares_prompts
    kl = {"reference": "initial", "coefficient": 0.1, "refresh_every_num_steps": 1}
    sections = {"model": {"dtype": "bfloat16"}, "algorithm": {"kl": kl}, "learner": {"compile": True}}
    same = make_learner(family=family, **sections)  # its look-ups round as training does
    assert [train_step(same, seed)["loss/kl_ref"] for seed in range(2)] == [0.0, 0.0]
