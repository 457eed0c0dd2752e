"""TransformerLM: its layers by hand, and the whole against LlamaForCausalLM on the same folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyModel, change_weights, changed, edit_json, perturb, relative_difference
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from grpo_ray.config import Config
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.transformer_lm import TransformerLM
from grpo_ray.learning.transformer_lm.layers import RMSNorm
from grpo_ray.learning.transformer_lm.model import _allowed
from grpo_ray.run.preparation import check_files

VOCABULARY = 61
VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head, untied": {"num_key_value_heads": 4},
    "grouped-query, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "multi-query, wide heads": {"num_key_value_heads": 1, "head_dim": 12, "rms_norm_eps": 1e-3},
}


def make_config(**changes: Any) -> LlamaConfig:
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 7,
    }  # fmt: skip
    return LlamaConfig(**(shape | changes))


def make_model(seed: int = 0, **changes: Any) -> TransformerLM:
    """Make a model with weights large enough for non-uniform attention, and with norms other than 1."""
    torch.manual_seed(seed)
    model = TransformerLM(make_config(**changes))
    perturb(model, seed, scale=0.2)
    return model


def saved(model: TransformerLM, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def make_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def largest_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    assert expected.std() > 0.5  # otherwise any two would be close
    return (actual - expected).abs().max().item()


# ---- the layers, by hand ----


def test_rms_norm_squares_in_float32() -> None:
    """300^2 overflows float16."""
    norm = RMSNorm(2, 0.0).to(torch.float16)
    assert norm(torch.full((1, 2), 300.0, dtype=torch.float16)).tolist() == [[1.0, 1.0]]


def test_padding_attends_to_itself_and_plain_causality_needs_no_mask() -> None:
    assert _allowed(make_ids(1, 4), None, 0) is None  # a mask would keep torch from its fastest kernel
    allowed = _allowed(make_ids(1, 3), torch.tensor([[0, 0, 1]]), 0)
    assert allowed is not None
    assert allowed[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


# ---- the whole, against transformers ----


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[TransformerLM, LlamaForCausalLM]:
    """One folder, loaded by both implementations."""
    path = saved(make_model(**request.param), tmp_path / "model")
    ours = load_policy(path, implementation="grpo_ray")
    assert isinstance(ours, TransformerLM)
    return ours, load_policy(path)


def test_gradients_are_transformers(pair: tuple[TransformerLM, LlamaForCausalLM]) -> None:
    ids, directions = make_ids(3, 12, seed=3), torch.randn(3, 12, VOCABULARY)  # one is 7, which also pads
    gradients = []
    for model in pair:
        (model(ids).logits.log_softmax(-1) * directions).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        assert relative_difference(gradient, gradients[1][name]) < 1e-5, name


def left_padded(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make ids, mask and positions `[batch, longest]`; padding is token 7, an ordinary token."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - n) + [1] * n for n in lengths])
    return make_ids(len(lengths), longest).where(mask == 1, 7), mask, (mask.cumsum(1) - 1).clamp_min(0)


def test_logits_are_transformers_also_left_padded(pair: tuple[TransformerLM, LlamaForCausalLM]) -> None:
    ours, theirs = pair
    assert isinstance(theirs, LlamaForCausalLM)
    ids = make_ids(3, 20)
    with torch.no_grad():
        expected = theirs(ids).logits
        assert largest_difference(ours(ids).logits, expected) < 1e-4
        assert largest_difference(ours(ids, logits_to_keep=3).logits, expected[:, -3:]) < 1e-4
    lengths = [9, 4, 1]
    ids, mask, positions = left_padded(lengths)
    with torch.no_grad():
        logits = ours(ids, attention_mask=mask, position_ids=positions).logits
        from_place = ours(ids, attention_mask=mask).logits  # distances between positions are the same
        assert logits.isfinite().all()  # padding has nothing to attend to; this must not spread as NaN
        for row, length in enumerate(lengths):
            alone = theirs(ids[row : row + 1, -length:]).logits[0]
            for padded in (logits, from_place):
                assert largest_difference(padded[row, -length:], alone) < 1e-4


# ---- causality, positions and the cache ----


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.booleans(),
)
def test_cached_steps_are_one_full_forward(lengths: list[int], steps: list[int], has_mask: bool) -> None:
    """Prompts are left-padded to one width; steps have one or more tokens each."""
    model = make_model()
    lengths = lengths if has_mask else [max(lengths)] * len(lengths)
    prompt, mask, _ = left_padded(lengths)
    more = make_ids(len(lengths), sum(steps), seed=1)
    ids = torch.cat([prompt, more], dim=1)
    mask = torch.cat([mask, torch.ones_like(more)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    options = {"attention_mask": mask, "position_ids": positions} if has_mask else {}
    with torch.no_grad():
        full = model(ids, **options).logits
        cache, end = None, 0
        for length in [prompt.shape[1], *steps]:
            start, end = end, end + length
            options = {}
            if has_mask:
                options = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
            output = model(ids[:, start:end], past_key_values=cache, use_cache=True, **options)
            cache = output.past_key_values
            assert cache.get_seq_length() == end
            assert (output.logits - full[:, start:end])[mask[:, start:end].bool()].abs().max() < 1e-4


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": make_ids(4)}, r"input_ids: expected \[batch, seq\], not empty; got \[4\]"),
        ({"input_ids": make_ids(2, 0)}, r"input_ids: expected \[batch, seq\], not empty; got \[2, 0\]"),
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: expected \[2, 4\], a column .*; got \[2, 5\]"),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, r"attention_mask: expected \[2, 4\]"),
        ({"position_ids": torch.arange(4)}, r"position_ids: expected \[2, 4\]; got \[4\]"),
        ({"position_ids": torch.zeros(3, 4).long()}, r"position_ids: expected \[2, 4\]; got \[3, 4\]"),
    ],
)
def test_wrong_shapes_are_refused(inputs: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model()(**({"input_ids": make_ids(2, 4)} | inputs))


def test_a_cache_is_kept_on_request_and_the_mask_must_cover_it() -> None:
    model = make_model()
    assert model(make_ids(2, 4)).past_key_values is None
    cache = model(make_ids(2, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"expected \[2, 5\], a column for each token in the cache \(4\)"):
        model(make_ids(2, 1), attention_mask=torch.ones(2, 1), past_key_values=cache)


def test_initial_weights() -> None:
    """Weights are N(0, 0.02), divided by sqrt(2 * 8 layers) = 4 in o_proj and down_proj."""
    torch.manual_seed(5)
    model = TransformerLM(make_config(hidden_size=64, intermediate_size=128, num_hidden_layers=8))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            expected = 0.005 if "o_proj" in name or "down_proj" in name else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
            assert abs(parameter.mean().item()) < expected / 10, name


def test_bfloat16_is_close_to_float32() -> None:
    """Far from the first position, where angles in bfloat16 would be wrong."""
    model, ids, positions = make_model(), make_ids(2, 16), torch.arange(3000, 3016)[None]
    with torch.no_grad():
        expected = model(ids, position_ids=positions).logits
        logits = model.to(torch.bfloat16)(ids, position_ids=positions).logits
    assert logits.dtype == torch.bfloat16
    assert relative_difference(logits.float(), expected) < 0.03


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded_is_the_same_to_the_bit(tied: bool, tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=tied)
    path = saved(model, tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    expected = model.state_dict()
    for loaded in (load_policy(path, implementation="grpo_ray"), load_policy(path)):
        torch.testing.assert_close(loaded.state_dict(), expected, rtol=0, atol=0)
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert not loaded.training
    with torch.no_grad():
        loaded = load_policy(path, implementation="grpo_ray")
        assert torch.equal(loaded(make_ids(2, 9)).logits, model(make_ids(2, 9)).logits)


def test_folders_of_transformers_load(tmp_path: Path) -> None:
    """The folder has several files in bfloat16, and end tokens in its generation config."""
    theirs = LlamaForCausalLM(make_config()).to(torch.bfloat16)
    theirs.generation_config = GenerationConfig(eos_token_id=[3, 5])
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = load_policy(str(tmp_path / "theirs"), implementation="grpo_ray")
    expected = theirs.state_dict()
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert all(torch.equal(w, expected[name].float()) for name, w in ours.state_dict().items())
    ours.save_pretrained(tmp_path / "ours")
    assert GenerationConfig.from_pretrained(tmp_path / "ours").eos_token_id == [3, 5]
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'linear'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"attention_bias": True}, "biases (attention_bias)"),
        ({"mlp_bias": True, "hidden_act": "gelu"}, "biases (mlp_bias), hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights (quantization_config)"),
        ({"num_key_value_heads": 3}, "4 heads for 3 key and value heads"),
    ],
)
def test_other_models_are_refused_with_what_is_unsupported(values: dict, what: str, tmp_path: Path) -> None:
    path = saved(make_model(), tmp_path)
    edit_json(tmp_path / "config.json", **values)
    with pytest.raises(ValueError, match=r"model\.implementation: grpo_ray computes plain Llama") as caught:
        load_policy(path, implementation="grpo_ray")
    assert str(caught.value).endswith(f"{path!r} has {what}; set it to transformers")


def test_impossible_shapes_are_refused_by_their_config(tmp_path: Path) -> None:
    path = saved(make_model(), tmp_path)
    edit_json(tmp_path / "config.json", head_dim=7)  # rotary positions need pairs of components
    with pytest.raises(ValueError, match=r"(?s)model\.path: config\.json of .* cannot be used: .*even rotary"):
        load_policy(path, implementation="grpo_ray")


def test_refused_before_anything_is_started(tiny_config: Config, tiny_model: TinyModel) -> None:
    """The tiny model of transformers is a Qwen2 and is refused; that of TransformerLM passes."""
    passing, refused = (
        changed(
            tiny_config, model={"path": str(tiny_model(own=own)), "tiny": None, "implementation": "grpo_ray"}
        )
        for own in (True, False)
    )
    assert check_files(passing).longest_prompt
    with pytest.raises(ValueError, match=r"model\.implementation: .* has model_type 'qwen2'; set"):
        check_files(refused)


def test_missing_reshaped_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    path, up = saved(make_model(), tmp_path), "model.layers.1.mlp.up_proj.weight"
    change_weights(tmp_path, lambda tensors: tensors.update({up: tensors[up].T.contiguous()}))
    with pytest.raises(ValueError, match=rf"shapes do not match its config.json: {up}; copy"):
        load_policy(path, implementation="grpo_ray")
    change_weights(tmp_path, lambda tensors: tensors.pop(up))
    with pytest.raises(ValueError, match=rf"lacks tensors, .*: {up}; copy"):
        load_policy(path, implementation="grpo_ray")
    bias = "model.layers.0.self_attn.q_proj.bias"
    change_weights(tmp_path, lambda tensors: tensors.update({bias: torch.zeros(32)}))
    with pytest.raises(ValueError, match=rf"has the tensors {bias}; set it to transformers"):
        load_policy(path, implementation="grpo_ray")


def test_redundant_tensors_are_left_alone(tmp_path: Path) -> None:
    """Such tensors are a copy of tied weights, and the rotary frequencies of early Llama checkpoints."""
    model = make_model(tie_word_embeddings=True)
    path = saved(model, tmp_path)
    more = {"lm_head.weight": torch.zeros(VOCABULARY, 32)}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    change_weights(tmp_path, lambda tensors: tensors.update(more))
    for loaded in (load_policy(path, implementation="grpo_ray"), load_policy(path)):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
