"""Model FLOPs against figures worked out by hand and torch's count, and the Learner's figures made of them."""

from typing import Any

import numpy as np
import pytest
import torch
from builders import ENDS, TinyModel, changed, make_batch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner
from grpo_ray.learning.sequences import TrainSequence, lengths_of, sequences_of
from grpo_ray.learning.transformer_lm import TransformerLM
from grpo_ray.types import TrainBatch
from grpo_ray.watch.flops import ModelSize, Performance, WorkCount, num_pairs, num_tokens, peak_flops
from grpo_ray.watch.learner_metrics import mean_metrics

# A Llama: q and o 8 x 8, k and v 4 x 8, gate, up and down 8 x 20; the output layer 8 x 50.
SHAPE = {
    "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 20, "vocab_size": 50,
}  # fmt: skip
LAYER, OUTPUT = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 20, 8 * 50
WIDTH = 3 * 4 * 2  # layers x heads x head size
# Prompts of 3 and 5 tokens; two responses of 4 and 1 to the first, one of 2 to the second.
LENGTHS = [(0, 7, 4), (3, 4, 1), (0, 7, 2)]
TOKENS, RESPONSES = 3 + 4 + 1 + 5 + 2, 4 + 1 + 2
# A token's pairs are its place in its sequence, counted from 1.
PAIRS = (1 + 2 + 3) + (4 + 5 + 6 + 7) + 4 + (1 + 2 + 3 + 4 + 5) + (6 + 7)


def build(model_type: str, **changes: Any) -> Any:
    config = AutoConfig.for_model(model_type, **SHAPE, pad_token_id=0, **changes)
    return AutoModelForCausalLM.from_config(config)


def sequence(prompt: tuple[int, ...], num_response: int) -> TrainSequence:
    return TrainSequence(prompt, np.ones(num_response, np.int32), np.zeros(num_response, np.float32), 1.0)


def test_a_prompt_counts_once_however_many_responses_it_has() -> None:
    assert lengths_of([sequence((1, 2, 3), 4), sequence((9,) * 5, 2), sequence((1, 2, 3), 1)]) == LENGTHS
    assert num_tokens(LENGTHS) == TOKENS
    assert num_pairs(LENGTHS) == PAIRS
    assert num_pairs([]) == num_tokens([]) == 0
    # A window bounds the keys of a token.
    assert num_pairs(LENGTHS, window=3) == (1 + 2 + 3) + 4 * 3 + 3 + (1 + 2 + 3 + 3 + 3) + 2 * 3
    assert num_pairs(LENGTHS, window=7) == PAIRS


@pytest.mark.parametrize(("implementation", "is_tied"), [("transformers", True), ("grpo_ray", False)])
def test_a_llama_is_counted_by_hand(implementation: str, is_tied: bool) -> None:
    own = TransformerLM(LlamaConfig(**SHAPE, tie_word_embeddings=is_tied))
    size = ModelSize.of(own if implementation == "grpo_ray" else build("llama", tie_word_embeddings=is_tied))
    assert size == ModelSize(3 * LAYER, 3 * LAYER, OUTPUT, OUTPUT, {None: WIDTH})
    forward = 2 * 3 * LAYER * TOKENS + 2 * OUTPUT * RESPONSES + 4 * WIDTH * PAIRS
    assert size.forward_flops(LENGTHS) == forward
    assert size.training_flops(LENGTHS) == 3 * forward


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_count_is_what_torch_computes_apart_from_the_keys_that_a_mask_hides(is_tied: bool) -> None:
    model, length = build("llama", tie_word_embeddings=is_tied, attn_implementation="eager"), 6
    size = ModelSize.of(model)
    hidden = 4 * WIDTH * (length**2 - num_pairs([(0, length, length - 2)]))
    with FlopCounterMode(display=False) as counter:
        output = model(torch.arange(length)[None], use_cache=False, logits_to_keep=length - 2)
    assert counter.get_total_flops() == size.forward_flops([(0, length, length - 2)]) + hidden
    with counter:
        output.logits.sum().backward()
    assert counter.get_total_flops() == 2 * (size.forward_flops([(0, length, length - 2)]) + hidden)


def test_biases_norms_and_embeddings_are_not_counted() -> None:
    assert ModelSize.of(build("qwen2", tie_word_embeddings=True)).linear == 3 * LAYER
    assert ModelSize.of(build("llama", attention_bias=True, mlp_bias=True)).linear == 3 * LAYER


def test_a_token_takes_its_experts_and_the_router() -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "head_dim": 2}
    size = ModelSize.of(build("qwen3_moe", **experts, decoder_sparse_step=1, mlp_only_layers=[]))
    assert size.linear == pytest.approx(3 * (2 * 8 * 8 + 2 * 8 * 4 + 6 * 8 + 2 * 3 * 8 * 5))
    assert size.attention_width == {None: WIDTH}
    experts = {"num_experts": 6, "moe_intermediate_size": 5, "enable_moe_block": True, "head_dim": 2}
    one, two = (ModelSize.of(build("gemma4_text", **experts, top_k_experts=number)) for number in (1, 2))
    assert two.linear - one.linear == pytest.approx(3 * 3 * 8 * 5)


def test_experts_in_a_list_are_counted_as_one_tensor_of_them() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 5, bias=False) for _ in range(4))
            self.shared_experts = torch.nn.Linear(8, 3, bias=False)

    model = build("llama", num_experts_per_tok=1)
    model.model.layers[0].moe = Layer()
    assert ModelSize.of(model).linear == 3 * LAYER + 8 * 5 + 8 * 3


def test_layers_with_a_window_are_counted_by_it() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    assert ModelSize.of(build("qwen2", **windows)).attention_width == {None: WIDTH / 3, 3: 2 * WIDTH / 3}
    assert ModelSize.of(build("qwen2", sliding_window=3)).attention_width == {None: WIDTH}
    assert ModelSize.of(build("mistral", sliding_window=3)).attention_width == {3: WIDTH}
    sizes = {"head_dim": 2, "global_head_dim": 5, "vocab_size_per_layer_input": 50, "sliding_window": 3}
    assert ModelSize.of(build("gemma4_text", **sizes)).attention_width == {3: 2 * 4 * 2, None: 4 * 5}


def test_latent_attention_has_keys_and_values_of_different_sizes() -> None:
    sizes = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 2, "kv_lora_rank": 4, "q_lora_rank": 4}
    size = ModelSize.of(build("deepseek_v3", **sizes, first_k_dense_replace=3))
    assert size.attention_width == {None: 3 * 4 * (10 + 2) / 2}


def test_frozen_matrices_get_no_gradient_of_their_own() -> None:
    model = build("llama", tie_word_embeddings=False)
    model.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(True)
    size = ModelSize.of(model)
    assert (size.linear_trained, size.output_trained) == (3 * 8 * 20, 0)
    passed = 3 * LAYER * TOKENS + OUTPUT * RESPONSES
    assert size.training_flops(LENGTHS) == 4 * passed + 2 * 3 * 8 * 20 * TOKENS + 12 * WIDTH * PAIRS


@pytest.mark.parametrize(
    ("name", "tflops", "float32"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 67),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA L40S", 362, 91.6),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA GB200", 2500, 80),
    ],
)
def test_the_peak_is_found_by_the_drivers_name(name: str, tflops: float, float32: float) -> None:
    assert peak_flops(name, torch.bfloat16) == pytest.approx(1e12 * tflops)
    assert peak_flops(name, torch.float32) == pytest.approx(1e12 * float32)
    assert peak_flops("NVIDIA A10G", torch.bfloat16) is None
    assert peak_flops("NVIDIA H200", torch.float64) is None


# ---- the Learner's figures ----


def test_the_figures_of_a_step_are_its_work_over_seconds_and_peak(tiny_config: Config) -> None:
    work, config = WorkCount(3e12, 800), changed(tiny_config, learner={"peak_tflops": 2.0})
    performance = Performance(config, torch.device("cpu"))
    assert performance.take(work, seconds=4.0) == {
        "perf/mfu": pytest.approx(3 / 4 / 2),
        "perf/tokens_per_s_per_device": 200,
    }
    assert performance.take(work, seconds=1.0) == {"perf/mfu": 0, "perf/tokens_per_s_per_device": 0}
    # A CPU has no peak of its own, and no device memory.
    assert Performance(tiny_config, torch.device("cpu")).take(work, 1.0) == {"perf/tokens_per_s_per_device": 0}


def test_a_gpus_peak_is_its_data_sheets_and_its_memory_peak_begins_again(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    device, work = torch.device("cuda"), WorkCount(flops=6.7e12)
    figures = Performance(changed(tiny_config, model={"dtype": "float32"}), device).take(work, 1.0)
    assert figures["perf/mfu"] == pytest.approx(0.1)
    assert figures["memory/learner_device_peak_bytes"] == 7
    assert resets == [device]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H2000")
    assert "perf/mfu" not in Performance(tiny_config, device).take(work, 1.0)


def test_shares_are_of_the_computed_tokens() -> None:
    sums = {"computed_tokens": 80.0, "prompt_tokens": 20.0, "padding_tokens": 4.0}
    assert mean_metrics(sums) == {"perf/prompt_frac": 0.25, "perf/padding_frac": 0.05}
    assert mean_metrics({"computed_tokens": 0.0}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["none", "initial", "ema with a coefficient"])
def test_a_learner_counts_what_its_updates_need(tiny_config: Config, tiny_model: TinyModel, kl: str) -> None:
    """Per epoch, both passes of the sequences with signal or a KL term; per other policy, all forward once."""
    terms: dict[str, Any] = {
        "none": {},
        "initial": {"kl": {"reference": "initial"}},
        "ema with a coefficient": {"kl": {"reference": "ema", "coefficient": 0.1}},
    }[kl]
    options = {"epochs_per_batch": 2, "old_log_probs": "proximal", "loss": "grpo_clip"}
    config = changed(tiny_config, algorithm=options | terms, learner={"peak_tflops": 0.001})
    learner = Learner(str(tiny_model()), config, ENDS)
    size = ModelSize.of(learner.model)
    for version in range(2):  # the second step's figures are its own
        groups = tuple(make_batch(learner, seed=version, versions=version))
        sequences = sequences_of(groups)
        silent = lengths_of([s for s in sequences if not s.has_signal])
        trained = lengths_of([s for s in sequences if s.has_signal or "coefficient" in kl])
        needed = (1 + (kl != "none")) * size.forward_flops(lengths_of(sequences))
        needed += 2 * size.training_flops(trained)
        if kl == "initial":  # measured on the responses without a gradient as well
            needed += 2 * size.forward_flops(silent)
        metrics = learner.train_step(TrainBatch(groups)).metrics
        seconds = metrics["timing/train_s"]
        assert metrics["perf/mfu"] * seconds * 1e9 == pytest.approx(needed)
        assert metrics["perf/tokens_per_s_per_device"] * seconds == pytest.approx(2 * num_tokens(trained))
