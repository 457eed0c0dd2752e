"""Adapters on a frozen base: their gradients, merged weights, files, and what is refused."""

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    TinyModel,
    changed,
    make_batch,
    perturb,
    plain_logprobs,
    relative_difference,
    tensors_of,
    train_step,
    written,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, JambaConfig

from grpo_ray.config.model import AdapterConfig, ModelConfig
from grpo_ray.core.learner import Learner
from grpo_ray.engines.vllm_engine import ServedAdapter
from grpo_ray.learning.adapters import (
    add_adapter,
    load_trained,
    save_adapter,
    served_weights,
    trained_parameters,
)
from grpo_ray.learning.loading import load_policy, skeleton
from grpo_ray.learning.quantization import dequantized
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.records.adapter_files import CONFIG, FILE, saved_config
from grpo_ray.watch.flops import ModelSize

SECTIONS = {"model": {"adapter": {"rank": 4}}, "learner": {"learning_rate": 1e-2}}


def options(folder: Path | str, quantization: str = "none", **adapter: Any) -> ModelConfig:
    own = AdapterConfig(rank=4, **adapter)
    return ModelConfig(path=str(folder), dtype="float32", base_quantization=quantization, adapter=own)


def perturbed(model: torch.nn.Module, seed: int = 3) -> None:
    """Change every value of the adapter, so that it has an effect."""
    perturb(torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad), seed, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["owner/name", f"owner/name@{'a' * 40}", "LOCAL/a@b"])
def test_an_adapter_names_its_base_as_peft_does(tmp_path: Path, tiny_model: TinyModel, base: str) -> None:
    config = AdapterConfig(rank=2, alpha=4, target_modules=("layers.0.self_attn.q_proj", "up_proj"))
    base = base.replace("LOCAL", str(tmp_path))
    model: Any = load_policy(str(tiny_model()))
    add_adapter(model, config, base)
    save_adapter(model, dict(trained_parameters(model)), tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    named = ("owner/name", "a" * 40) if base.startswith("owner/name@") else (base, None)
    assert (saved["base_model_name_or_path"], saved["revision"]) == named
    assert saved_config(tmp_path)[0] == base
    assert set(saved_config(tmp_path)[1].target_modules or ()) == set(saved["target_modules"])


# ---- the same as PEFT ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "quantization"),
    [
        ({}, "none"), ({"rslora": True}, "none"), ({"dora": True}, "none"), ({"dora": True}, "nf4"),
        ({"target_modules": ["q_proj", "down_proj"]}, "none"),
    ],
)  # fmt: skip
def test_merged_weights_give_pefts_own_logits(adapter: dict, quantization: str, tiny_model: TinyModel) -> None:
    path = tiny_model(hidden_size=64 if quantization == "nf4" else 32)
    model = load_trained(str(path), options(path, quantization, **adapter), torch.device("cpu"))
    perturbed(model)
    merged = load_policy(str(path))
    weights = dict(served_weights(model))
    in_memory = [name for name, weight in weights.items() if isinstance(weight, torch.Tensor)]
    num_adapted = 2 * len(adapter.get("target_modules", range(7)))  # linear layers of two blocks
    assert len(weights) - len(in_memory) == num_adapted  # merged one at a time
    expected = {name: p.shape for name, p in merged.named_parameters()}
    served = {name: weight.detach() for name, weight in weights.items()}
    assert {name: weight.shape for name, weight in served.items()} == expected
    assert any(not torch.equal(served[name], p) for name, p in merged.named_parameters())
    merged.load_state_dict(served, strict=False)
    tokens = torch.randint(20, 280, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bound = 1e-6 if quantization == "none" else 1e-5
        assert relative_difference(merged(tokens).logits, model(tokens).logits) < bound


@pytest.mark.slow
def test_the_gradient_is_that_of_a_peft_model(make_learner: MakeLearner, tmp_path: Path) -> None:
    """PeftModel, loaded from the checkpoint, differentiates the loss in plain loops."""
    learner = make_learner(algorithm={"loss": "reinforce_with_baseline", "aggregation": "sequence_mean"})
    perturbed(learner.model)
    groups, folder = make_batch(learner), written(learner, tmp_path / "step")
    theirs = peft_model(folder, is_trainable=True)
    losses = [
        -float(advantage) * plain_logprobs(theirs, item.prompt_token_ids, c.token_ids, 1.0, 2, ENDS).mean()
        for group in groups
        for item in [group.rollout.item]
        for c, advantage in zip(group.rollout.completions, group.advantages, strict=True)
    ]
    (sum(losses) / len(losses)).backward()
    learner.accumulate_gradient(sequences_of(groups))
    found = {f"base_model.model.{name}": p.grad for name, p in learner.masters.named.items()}
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient is not None
        assert relative_difference(gradient, expected[name]) < 1e-6, name


def peft_model(folder: Path, **options: Any) -> PeftModel:
    """Load a checkpoint as a user of peft would, base included."""
    base = json.loads((folder / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder), **options).eval()


@pytest.mark.slow
def test_a_checkpoint_merges_in_peft_to_what_generators_get(make_learner: MakeLearner, tmp_path: Path) -> None:
    """With DoRA, which has all kinds of tensors; the gradient above is of a plain adapter's checkpoint."""
    learner = make_learner(model={"adapter": {"rank": 4, "dora": True}})
    train_step(learner)
    served = tensors_of(learner.snapshot()[0])
    theirs = dict(peft_model(written(learner, tmp_path / "step")).merge_and_unload().named_parameters())
    torch.testing.assert_close(served, theirs, rtol=1e-5, atol=1e-7)
    assert {f.name for f in (tmp_path / "step").glob("*.safetensors")} == {FILE}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "nf4")])
def test_only_the_adapter_is_trained(dtype: str, quantization: str, make_learner: MakeLearner) -> None:
    learner = make_learner(model={"dtype": dtype, "base_quantization": quantization})
    frozen = {n: p for n, p in learner.model.named_parameters() if not p.requires_grad}
    base = {n: zlib.crc32(raw(p)) for n, p in frozen.items()}
    assert base
    for seed in range(2):
        train_step(learner, seed)
    assert {n: zlib.crc32(raw(p)) for n, p in frozen.items()} == base
    assert all(p.grad is None for p in frozen.values())
    assert all(".lora_" in name for name in learner.masters.named)
    assert {p.dtype for p in learner.masters.parameters} == {torch.float32}
    assert set(learner._optimizer.state) == set(learner.masters.parameters)
    weights = {p.dtype for n, p in learner.model.named_parameters() if ".base_layer.weight" in n}
    assert weights == {torch.uint8 if quantization == "nf4" else getattr(torch, dtype)}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
def test_the_package_s_own_model_is_adapted_too(make_learner: MakeLearner) -> None:
    learner = make_learner(family="grpo_ray", learner={"gradient_checkpointing": "selective"})
    before = tensors_of(learner.snapshot()[0])
    train_step(learner)
    after = tensors_of(learner.snapshot()[0])
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "_proj" in name}


# ---- the reference ----


@pytest.mark.slow
def test_the_initial_reference_is_the_base(make_learner: MakeLearner, tiny_model: TinyModel) -> None:
    learner = make_learner(algorithm={"kl": {"reference": "initial", "coefficient": 0.1}})
    first, second = train_step(learner, 0), train_step(learner, 1)
    assert abs(first["loss/kl_ref_k3"]) < 1e-9
    assert second["loss/kl_ref_k3"] > 1e-5
    base, tokens = load_policy(str(tiny_model())), torch.arange(20, 40)[None]
    before = learner.model(tokens).logits
    with learner._reference.in_use() as reference, torch.no_grad():
        assert reference is learner.model
        assert relative_difference(reference(tokens).logits, base(tokens).logits) < 1e-6
    assert torch.equal(learner.model(tokens).logits, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kl"),
    [
        ({"dtype": "bfloat16"}, {"reference": "ema", "coefficient": 0.1, "ema_decay": 0.5}),
        ({"dtype": "bfloat16", "base_quantization": "nf4"}, {"reference": "none"}),
        ({"adapter": {"rank": 4, "dora": True}}, {"reference": "initial", "coefficient": 0.1}),
    ],
    ids=["bfloat16-ema", "nf4", "dora-initial"],
)
def test_training_resumes_bit_for_bit(model: dict, kl: dict, make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner(model=model, algorithm={"kl": kl})
    for seed in range(2):
        train_step(learner, seed)
    resumed = make_learner(checkpoint=written(learner, tmp_path / "step"), model=model, algorithm={"kl": kl})
    assert resumed.version == 2
    assert raw_state(learner) == raw_state(resumed)
    metrics = [train_step(each, 2) for each in (learner, resumed)]
    first, second = ({name: value for name, value in own.items() if "loss" in name} for own in metrics)
    assert first == second
    assert raw_state(learner) == raw_state(resumed)


def raw_state(learner: Learner) -> list[bytes]:
    served = tensors_of(learner.snapshot()[0])  # not its bytes: the gaps between tensors hold anything
    return [raw(tensor) for tensor in (*served.values(), *learner.masters.parameters)]


@pytest.mark.slow
def test_an_adapter_is_continued_elsewhere_or_by_an_average(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    train_step(learner)
    folder = written(learner, tmp_path / "step")
    kl = {"reference": "initial", "coefficient": 0.1}
    continued = make_learner(model={"adapter": {"rank": 4, "path": str(folder)}}, algorithm={"kl": kl})
    assert continued.version == 0
    assert raw_state(continued) == raw_state(learner)
    assert abs(train_step(continued, 1)["loss/kl_ref_k3"]) < 1e-9  # its beginning is this adapter, not the base
    average = {"reference": "ema", "ema_decay": 0.5, "coefficient": 0.1}
    resumed = make_learner(checkpoint=folder, algorithm={"kl": average})
    assert resumed._reference is not None
    averages, policys = (each.masters.parameters for each in (resumed._reference, learner))
    assert [raw(p) for p in averages] == [raw(p) for p in policys]


@pytest.mark.slow
def test_a_4_bit_base_computes_what_its_dequantized_copy_does(
    make_learner: MakeLearner, tiny_model: TinyModel, tmp_path: Path
) -> None:
    quantized, folder = make_learner(model={"base_quantization": "nf4"}), tiny_model(hidden_size=64)
    original = {name: p.detach() for name, p in load_policy(str(folder)).named_parameters()}
    served = tensors_of(quantized.snapshot()[0])
    rounded = {name for name, weight in served.items() if not torch.equal(weight, original[name])}
    assert rounded == {name for name in served if "_proj.weight" in name}
    assert all(0.05 < relative_difference(served[name], original[name]) < 0.12 for name in rounded)
    shutil.copytree(folder, tmp_path / "copy")
    copy = load_policy(str(folder))
    copy.load_state_dict(served, strict=False)
    copy.save_pretrained(tmp_path / "copy")
    config = changed(quantized._config, model={"base_quantization": "none"})
    plain = Learner(str(tmp_path / "copy"), config, ENDS)
    for learner in (quantized, plain):
        perturbed(learner.model)
    merged, expected = tensors_of(quantized.snapshot()[0]), tensors_of(plain.snapshot()[0])
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    groups = make_batch(plain)
    for learner in (quantized, plain):
        learner.accumulate_gradient(sequences_of(groups))
    for name, master in quantized.masters.named.items():
        assert relative_difference(master.grad, plain.masters.named[name].grad) < 1e-5, name


def test_rows_that_are_not_whole_blocks_are_not_quantized(tiny_model: TinyModel) -> None:
    """bitsandbytes on a CPU would dequantize them with the wrong scales."""
    config = options(tiny_model(), "nf4")
    model = load_trained(str(tiny_model()), config, torch.device("cpu"))  # 32 wide, 64 in the MLP
    widths = {n.split(".")[4]: p.dtype for n, p in model.named_parameters() if n.endswith("base_layer.weight")}
    assert widths.pop("down_proj") is torch.uint8
    assert set(widths.values()) == {torch.float32}


def test_a_new_dora_adapter_serves_its_base_also_in_bfloat16(make_learner: MakeLearner) -> None:
    """PEFT rounds the lengths of rows to the base's dtype, and so does the merge."""
    learner = make_learner(model={"adapter": {"rank": 4, "dora": True}, "dtype": "bfloat16"})
    base = load_policy(learner._tokenizer.name_or_path).state_dict()
    served = tensors_of(learner.snapshot()[0])
    assert all(torch.equal(value, base[name].to(value.dtype)) for name, value in served.items())


def test_layers_without_adapter_are_served_dequantized_and_counted_whole(make_learner: MakeLearner) -> None:
    learner = make_learner(
        model={"adapter": {"rank": 4, "target_modules": ["q_proj"]}, "base_quantization": "nf4"}
    )
    served = tensors_of(learner.snapshot()[0])
    gate: Any = learner.model.get_submodule("model.layers.0.mlp.gate_proj")
    assert gate.weight.dtype is torch.uint8
    assert torch.equal(served["model.layers.0.mlp.gate_proj.weight"], dequantized(gate.weight).float())
    config = changed(learner._config, model={"base_quantization": "none"})
    plain = Learner(str(learner._tokenizer.name_or_path), config, ENDS)
    assert ModelSize.of(learner.model) == ModelSize.of(plain.model)


@pytest.mark.slow
def test_bad_adapters_are_refused(make_learner: MakeLearner, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = written(make_learner(), tmp_path / "step")

    def check(match: str, base: Path | None = None, **adapter: Any) -> None:
        base = base or tiny_model()
        model = skeleton(str(base), False, "transformers")
        with pytest.raises(ValueError, match=match):
            add_adapter(model, AdapterConfig(rank=4, **adapter), str(base))

    fitting = AdapterConfig(rank=4, path=str(folder))
    add_adapter(skeleton(str(tiny_model()), False, "transformers"), fitting, str(tiny_model()))
    query = "target_modules: the model has no linear layer 'query' to adapt; it has down_proj"
    check(query, target_modules=["query"])
    check(r"no linear layer 'lm_head'", target_modules=["lm_head"])
    check(r"adapter\.rslora: the adapter in", path=str(folder), rslora=True)
    check(r"adapter\.path: .* has no adapter_config\.json", path=str(tmp_path))
    check(r"another base \(.*with other weights than", tiny_model(hidden_size=64), path=str(folder))
    check(r"another base, or of other layers: .* is missing", path=str(folder), target_modules=["q_proj"])
    # Of a base of the same shape, told by its weights; and without a digest, as peft itself writes.
    check(r"another base \(", tiny_model(tied=False), path=str(folder))
    values = load_file(folder / FILE)
    save_file(values, folder / FILE)
    check(r"another base, or of other layers", tiny_model(hidden_size=64), path=str(folder))
    save_file({name: value * torch.nan for name, value in values.items()}, folder / FILE)
    with pytest.raises(ValueError, match="NaN or infinite"):
        load_trained(str(tiny_model()), options(tiny_model(), path=str(folder)), torch.device("cpu"))
    saved = json.loads((folder / CONFIG).read_text())
    changes_base = ({"init_lora_weights": name} for name in ("pissa_niter_4", "lora_ga"))
    for change in ({"alpha_pattern": {"q_proj": 64}}, *changes_base):
        (folder / CONFIG).write_text(json.dumps(saved | change))
        check(rf"has {next(iter(change))}=.*, which would be ignored", path=str(folder))
        with pytest.raises(ValueError, match="which would be ignored"):
            saved_config(folder)
    (folder / CONFIG).write_text(json.dumps(saved | {"target_modules": ".*_proj"}))
    with pytest.raises(ValueError, match="target_modules is the pattern"):
        saved_config(folder)
    (folder / FILE).write_bytes(b"damaged")
    check(r"is damaged", path=str(folder))
    (folder / CONFIG).write_text("[1]")
    check(r"is damaged \(", path=str(folder))


def test_the_folder_of_a_killed_engine_is_removed_by_the_next() -> None:
    killed, other = (ServedAdapter(AdapterConfig()) for _ in range(2))
    os.close(killed._lock)  # as the system does
    last = ServedAdapter(AdapterConfig())
    folders = [adapter._folder.exists() for adapter in (killed, other, last)]
    last.close(), other.close()
    assert folders == [False, True, True]


def test_layers_that_peft_takes_for_experts_are_left_out() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 2}
    with torch.device("meta"):  # their values, of up to 450 MB, do not matter
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(**sizes, first_k_dense_replace=1))
        jamba = AutoModelForCausalLM.from_config(JambaConfig(**sizes))
    add_adapter(model, AdapterConfig(rank=2), "base")
    adapted = {name.split(".")[-4] for name, weight in model.named_parameters() if weight.requires_grad}
    assert adapted == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    with pytest.raises(ValueError, match="no linear layer 'dt_proj'"):  # it uses the weight alone
        add_adapter(jamba, AdapterConfig(rank=2, target_modules=("dt_proj",)), "base")
