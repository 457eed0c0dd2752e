"""Weights as they are sent to vLLM: like those in the files that `save_pretrained` writes."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import ENDS, TinyModel, changed, make_batch, make_settings, perturb, tensors_of, written
from safetensors.torch import load_file
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner
from grpo_ray.engines import make_engine
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.learning import hub_format
from grpo_ray.learning.adapters import served_weights
from grpo_ray.learning.hub_format import in_hub_format, load_hub_format, model_tensors
from grpo_ray.learning.loading import load_policy
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import TrainBatch


@pytest.fixture(params=["experts", "fused and renamed", "plain"])
def model(request: pytest.FixtureRequest, tiny_moe: Path, tiny_model: TinyModel) -> Any:
    if request.param == "experts":
        return load_policy(str(tiny_moe))
    model: Any = load_policy(str(tiny_model()))
    if request.param == "fused and renamed":
        for layer in model.model.layers:  # as many heads of keys as of queries, so that three equal parts fit
            for name in ("k_proj", "v_proj"):
                setattr(layer.self_attn, name, torch.nn.Linear(32, 32))
        parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]  # of one tensor in the files
        fused = WeightConverter(
            source_patterns="self_attn.qkv.weight", target_patterns=parts, operations=[Chunk(dim=0)]
        )
        renamed = WeightRenaming(source_patterns="model.blocks.", target_patterns="model.layers.")
        model._weight_conversions = [renamed, fused]
    return model


def test_what_is_sent_is_what_the_files_hold_and_loads_into_another_model(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    sent = in_hub_format(model, served_weights(model))
    found, expected = ({n: (w.shape, w.dtype) for n, w in each} for each in (sent, files.items()))
    assert found == expected
    for name, weight in sent:
        assert torch.equal(weight.detach(), files[name]), name
    for name, weight in reversed(sent):  # in any order, again
        assert torch.equal(weight.detach(), files[name]), name
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    perturb(model, seed=1, scale=0.1)
    assert not any(torch.equal(p, before[name]) for name, p in model.named_parameters())
    load_hub_format(model, files)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_new_model_is_sent_like_a_loaded_one(tiny_moe: Path) -> None:
    loaded: Any = load_policy(str(tiny_moe))
    new = type(loaded)(loaded.config)
    names = [[name for name, _ in in_hub_format(m, model_tensors(m))] for m in (loaded, new)]
    assert names[0] == names[1]
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in names[1]


@pytest.mark.slow
def test_one_group_is_converted_at_a_time(tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    most = 0
    revert = hub_format.revert_weight_conversion

    def counted(*args: Any) -> dict[str, torch.Tensor]:
        nonlocal most
        tensors = revert(*args)
        made.extend(weakref.ref(tensor) for tensor in tensors.values() if not tensor.is_meta)
        gc.collect()
        most = max(most, sum(reference() is not None for reference in made))
        return tensors

    monkeypatch.setattr(hub_format, "revert_weight_conversion", counted)
    model = load_policy(str(tiny_moe))
    gc.freeze()  # what other tests left is not looked at again and again
    pack_weights(in_hub_format(model, served_weights(model)), 1, torch.float32)
    gc.unfreeze()
    assert len(made) == 2 * 3 * 4  # layers, tensors of an expert, experts: each made once
    assert most == 2 * 4  # gates and ways up of one layer's experts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sent_is_what_a_checkpoint_has(dtype: str, tiny_moe: Path, tiny_config: Config, tmp_path: Path) -> None:
    learner = Learner(str(tiny_moe), changed(tiny_config, model={"dtype": dtype}), ENDS)
    gate: Any = learner.model.get_submodule("model.layers.1.mlp.gate")
    correction = torch.randn(4)  # in float32 whatever the weights are
    gate.register_buffer("e_score_correction_bias", correction)
    gate.register_buffer("scratch", torch.zeros(4), persistent=False)
    before = tensors_of(learner.snapshot()[0])
    report = learner.train_step(TrainBatch(tuple(make_batch(learner))))
    assert report.events == {}
    sent = tensors_of(learner.snapshot()[0])
    files = load_file(written(learner, tmp_path / "checkpoint") / "model.safetensors")
    torch.testing.assert_close(sent, files, rtol=0, atol=0)
    assert torch.equal(sent.pop("model.layers.1.mlp.gate.e_score_correction_bias"), correction)
    assert {tensor.dtype for tensor in sent.values()} == {getattr(torch, dtype)}
    moved = {name for name in sent if not torch.equal(sent[name], before[name])}
    assert {name for name in sent if ".experts." in name or "mlp.gate" in name} <= moved


async def test_the_reference_engine_loads_what_is_sent(tiny_moe: Path, tiny_config: Config) -> None:
    engine = make_engine(tiny_config, str(tiny_moe), max_model_len=64, seed=0)
    assert isinstance(engine, TorchEngine)
    model = load_policy(str(tiny_moe))
    perturb(model, seed=1, scale=0.1)
    await engine.stage(pack_weights(in_hub_format(model, served_weights(model)), 1, torch.float32))
    await engine.load()
    with pytest.raises(ValueError, match=r"does not fit the model: missing \[.*experts\.0\.down_proj"):
        await engine.stage(pack_weights(model.named_parameters(), 2, torch.float32))
    await engine.generate((1, 2), make_settings())
    mine, theirs = dict(engine._model.named_parameters()), dict(model.named_parameters())
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
