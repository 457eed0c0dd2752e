"""Plans against what torch allocates, what models have, what a run measured, and figures computed by hand."""

import json
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders import ENDS, TinyModel, changed, make_batch
from commands import Capture, printed
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import make_config, train, until
from run_process import output_of
from small_run import QUICKSTART
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.config.model import ModelConfig, TinyModelConfig
from grpo_ray.core.controller import Controller
from grpo_ray.core.learner import Learner
from grpo_ray.core.producer import SLICE
from grpo_ray.learning import log_probs
from grpo_ray.learning.attention import NAME as ATTENTION
from grpo_ray.learning.attention import BlockAttention, VarlenAttention
from grpo_ray.learning.families import SegmentTree
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.loading import cast_parameters
from grpo_ray.learning.microbatch import MicroBatch, collate_packed, collate_padded
from grpo_ray.learning.policy_model import with_head_dtype
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.learning.tiny_tokenizer import tiny_tokenizer
from grpo_ray.learning.transformer_lm import TransformerLM
from grpo_ray.objectives import chunked, chunked_log_probs
from grpo_ray.run.machine import _emulates_bfloat16
from grpo_ray.run.preparation import check_files
from grpo_ray.run.tiny_model import build_model
from grpo_ray.tools.planning import gpu_memory, learner_memory
from grpo_ray.tools.planning.command import PlanOptions
from grpo_ray.tools.planning.gpu_memory import CONTEXT_BYTES, ENGINE_BYTES, GIB, Budget, concurrent_sequences
from grpo_ray.tools.planning.learner_memory import Tokens, largest_micro_batch, state_items, working_items
from grpo_ray.tools.planning.memory_plan import plan_memory
from grpo_ray.tools.planning.model_shape import ModelShape, find_shape, shape_of
from grpo_ray.types import TrainBatch

QWEN = "configs/qwen2.5-math-1.5b.yaml"
SMALL_BATCHES = (
    "learner.micro_batch_tokens=4096", "learner.gradient_checkpointing=true", "learner.compile=false",
)  # fmt: skip
ON_ONE_GPU = ("generator.colocated=true", "weight_sync.max_lag=0")
SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 176, "vocab_size": 320,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 untied": {"model_type": "qwen2", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama with wide heads": {"model_type": "llama", "head_dim": 32},
    "mistral": {"model_type": "mistral"},
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0},
}


def published(family: str, sizes: str, vocab_size: int, tied: bool, **others: Any) -> dict[str, Any]:
    """Return a published config.json, as far as a plan reads it."""
    given = dict(zip(SMALL, [*map(int, sizes.split()), vocab_size], strict=True))
    return {"model_type": family, **given, "tie_word_embeddings": tied, **others}


QWEN_1_5B = published("qwen2", "1536 28 12 2 8960", 151936, True)
QWEN_7B = published("qwen2", "3584 28 28 4 18944", 152064, False)


def plan_config(**changes: dict[str, Any]) -> Config:
    """Return configs/qwen2.5-math-1.5b.yaml with small micro-batches and other changes."""
    return changed(load_config(QWEN, SMALL_BATCHES), **changes)


def small_model(family: str, **sizes: int) -> tuple[Any, ModelShape]:
    """Build a model of transformers with the Learner's attention, or for `grpo_ray` a TransformerLM."""
    data = {**SMALL, **FAMILIES["llama" if family == "grpo_ray" else family], **sizes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data), attn_implementation="sdpa")
    model.set_attn_implementation(ATTENTION)
    return TransformerLM(model.config) if family == "grpo_ray" else model, shape_of(data, data["model_type"])


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str) -> None:
    with torch.device("meta"):
        model, shape = small_model(family)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    matrices.pop("lm_head.weight", 0)
    assert shape.num_layers * shape.layer_matrices == sum(matrices.values())


@pytest.mark.parametrize("implementation", ["transformers", "grpo_ray"])
def test_a_tiny_model_has_the_parameters_it_is_planned_with(tiny_config: Config, implementation: Any) -> None:
    tiny = TinyModelConfig(hidden_size=64, num_layers=2, intermediate_size=96, vocab_size=300, warmup=None)
    model = build_model(tiny, tiny_tokenizer(tiny_config), 0, implementation)
    vocab_size = model.get_parameter("model.embed_tokens.weight").shape[0]
    shape = replace(find_shape(ModelConfig(tiny=tiny, implementation=implementation)), vocab_size=vocab_size)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_shape_is_found_in_a_folder_and_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(QWEN_7B))
    (tmp_path / "models--someone--model" / "refs").mkdir()
    (tmp_path / "models--someone--model" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for path in (str(snapshot), "someone/model", "someone/model@abc"):
        assert find_shape(ModelConfig(path=path)) == shape_of(QWEN_7B, "x")


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (".", "{", "cannot be read"),
        (".", "[]", "no mapping"),
        (".", '{"model_type": "mamba"}', "'mamba'; a plan covers llama"),
        (".", '{"model_type": "llama", "hidden_size": 0}', "hidden_size is 0"),
        ("someone/no-such-model", "", "`hf download someone/no-such-model config.json`, or give a folder"),
        ("/no/such/folder", "", "no config.json in '/no/such/folder'; give a model's folder"),
        ("./none", "", "no config.json in './none'; give a model's folder"),
    ],
)
def test_an_unusable_or_missing_config_json_is_named(here: Path, path: str, text: str, message: str) -> None:
    (here / "config.json").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        find_shape(ModelConfig(path=path))


# ---- the Learner: against torch ----


class SavedByKernel(torch.autograd.Function):
    """A stand-in for FlashAttention that saves the same for its backward pass, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        mixed = torch.empty(queries.shape, dtype=queries.dtype)
        statistics = torch.empty(queries.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(queries, keys, values, mixed, statistics)
        return mixed


def varlen(tree: SegmentTree) -> VarlenAttention:
    return VarlenAttention.of(tree, lambda *tensors: SavedByKernel.apply(*tensors[:3]))


def kept_bytes(model: Any, batch: MicroBatch) -> int:
    """Return the bytes that torch keeps for the backward pass of all but the output layer, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages, kept = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # otherwise its address would be reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model.base_model(**log_probs.model_inputs(batch)).last_hidden_state
    return sum(storages.values())


def sequences_of_groups(num_groups: int, num_prompt: int, length: int) -> list[TrainSequence]:
    """Make groups of 8 responses of this length."""
    rng, behaviour = np.random.default_rng(0), np.full(length, -3.0, np.float32)
    prompts = [tuple(rng.integers(0, 300, num_prompt).tolist()) for _ in range(num_groups)]
    return [TrainSequence(p, rng.integers(0, 300, length), behaviour, 1.0) for p in prompts for _ in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype", "layout"),
    [("qwen2", "float32", "padded"), ("grpo_ray", "bfloat16", "padded"),
     ("llama with wide heads", "float32", "sdpa"), ("grpo_ray", "float32", "sdpa"),
     ("qwen3", "bfloat16", "sdpa"), ("qwen3", "bfloat16", "auto"), ("grpo_ray", "bfloat16", "auto")],
)  # fmt: skip
def test_a_layer_keeps_as_many_bytes_of_a_token_as_planned(family: str, dtype: str, layout: str) -> None:
    """Padded, and packed with either attention: that of GPUs in bfloat16, and that of all other cases."""
    is_sdpa = layout == "sdpa"
    model_section = {"dtype": dtype, "attention": "sdpa" if is_sdpa else "auto"}
    model_section |= {"implementation": "grpo_ray"} if family == "grpo_ray" else {}
    learner = {"micro_batch_tokens": 10**6, "share_prompts": "never" if layout == "padded" else "auto"}
    learner |= {"num_gpus": 0 if is_sdpa else 1}  # on a GPU these blocks would repeat keys
    sizes = {"sampling": {"max_tokens": 40}, "algorithm": {"prompts_per_step": 2}}
    config = plan_config(model=model_section, learner=learner, **sizes)
    sequences = sequences_of_groups(2, 8, 40)
    if layout == "padded":
        batch = collate_padded(sequences)
    else:
        batch = collate_packed(sequences, varlen if layout == "auto" else BlockAttention.of)
    tokens, kept = largest_micro_batch(config, 8), []
    assert (tokens.all, tokens.responses) == (batch.input_ids.numel(), 16 * 40)
    for num_layers in (2, 3):
        model, shape = small_model(family, num_hidden_layers=num_layers)
        cast_parameters(model.parameters(), getattr(torch, dtype))
        kept.append(kept_bytes(model, batch))
    # In addition, Qwen3's head norms keep a number per head, and attention in blocks its mask.
    tolerance = 0.012 * (family == "qwen3") + 0.005 * (layout == "sdpa" or family == "grpo_ray")
    planned = learner_memory.kept_per_token(shape, config, tokens)
    assert (kept[1] - kept[0]) / tokens.all == pytest.approx(planned, rel=tolerance)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of what torch allocated during `work`.

    Without oneDNN: on a CPU that cannot multiply bfloat16 itself, it would allocate float32 copies of products.
    """
    without_onednn = torch.backends.mkldnn.flags(enabled=False)
    with without_onednn, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "recomputation", "vocab_size", "chunk_bytes", "options"),
    [
        ("float32", False, 320, 2**28, {}),
        ("float32", False, 320, 2**28, {"model.implementation": "grpo_ray"}),
        ("float32", False, 320, 2**28, {"learner.share_prompts": "never"}),
        ("float32", True, 320, 2**28, {}),
        ("float32", False, 8192, 2**28, {}),
        ("float32", True, 8192, 2**22, {"algorithm.entropy_bonus": 0.1}),
        ("bfloat16", False, 320, 2**28, {}),
        ("bfloat16", False, 8192, 2**22, {}),
        ("bfloat16", True, 8192, 2**28, {}),
        ("bfloat16", True, 8192, 2**28, {"model.head_dtype": "float32"}),
        ("bfloat16", False, 8192, 2**22, {"model.head_dtype": "float32"}),
    ],
)
@pytest.mark.kept(
    "float32-False-320-268435456-options0",
    "float32-True-8192-4194304-options5",
    "bfloat16-False-8192-4194304-options10",
)
def test_a_micro_batch_takes_what_is_planned(
    monkeypatch: pytest.MonkeyPatch, dtype: str, recomputation: bool, vocab_size: int, chunk_bytes: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    options = {
        "model.dtype": dtype, "learner.gradient_checkpointing": recomputation, "learner.num_gpus": 0,
        "generator.num_gpus": 0, "learner.micro_batch_tokens": 10**6, "sampling.max_tokens": 40,
        "algorithm.prompts_per_step": 2, **options,
    }  # fmt: skip
    config = load_config(QWEN, [*SMALL_BATCHES, *(f"{field}={value}" for field, value in options.items())])
    monkeypatch.setattr(learner_memory, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(log_probs, "chunked_log_probs", partial(chunked_log_probs, chunk_bytes=chunk_bytes))
    family = "llama" if config.model.implementation == "transformers" else "grpo_ray"
    model, shape = small_model(family, vocab_size=vocab_size, num_hidden_layers=6, hidden_size=128)
    cast_parameters(with_head_dtype(model, config.model.head_dtype).parameters(), getattr(torch, dtype))
    if recomputation:
        model.train()
        model.gradient_checkpointing_enable()
    sequences = sequences_of_groups(2, 8, 40)
    forward_backward = ForwardBackward(config, ENDS, torch.device("cpu"))
    sums = forward_backward.backward(model, sequences)  # allocates the gradients
    measured = peak_bytes(lambda: forward_backward.backward(model, sequences))
    assert sums["computed_tokens"] == largest_micro_batch(config, 8).all
    planned = sum(item.num_bytes for item in working_items(shape, config, 8))
    if _emulates_bfloat16(config):  # converted copies come on top
        assert planned <= 1.03 * measured
        return
    is_layer_the_peak = recomputation and vocab_size == 320  # the plan counts only part of its gradients
    assert planned == pytest.approx(measured, rel=0.15 if is_layer_the_peak else 0.03)


DORA = {"rank": 4, "dora": True, "target_modules": ["q_proj", "up_proj"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "quantization", "reference"),
    [(None, "none", "none"), (None, "none", "initial"), (None, "none", "ema"), (DORA, "nf4", "none"),
     ({"rank": 4}, "none", "initial"), ({"rank": 4}, "nf4", "ema"), (DORA, "none", "ema")],
)  # fmt: skip
def test_the_state_is_what_a_learner_holds(
    tiny_config: Config, tiny_model: TinyModel, adapter: Any, quantization: str, reference: str
) -> None:
    model = {"dtype": "bfloat16", "adapter": adapter, "base_quantization": quantization}
    config = changed(tiny_config, model=model, algorithm={"kl": {"reference": reference}})
    folder = tiny_model(True, hidden_size=64)
    learner = Learner(str(folder), config, ENDS)
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    held: list[torch.Tensor] = [*learner.masters.parameters, *learner.model.parameters()]
    held += [p.grad for p in learner.masters.parameters if p.grad is not None]
    held += [m for state in learner._optimizer.state.values() for m in state.values() if m.ndim]
    if (kept := learner._reference) is not None:
        held += {*(kept._own if adapter else kept.model.parameters()), *kept.masters.parameters}
    states = [s for p in learner.model.parameters() if (s := getattr(p, "quant_state", None)) is not None]
    scales = sum(state.absmax.nbytes + state.state2.absmax.nbytes for state in states)
    shape = shape_of(json.loads((folder / "config.json").read_text()), "tiny")
    planned = sum(item.num_bytes for item in state_items(shape, config))
    # Small matrices have less than a whole group of 256 scales.
    slack = 4 * 2 * 7 if quantization == "nf4" else 0
    assert abs(planned - scales - sum(t.numel() * t.element_size() for t in held)) <= slack


# ---- figures by hand ----


SHAPE_1_5B, SHAPE_7B = shape_of(QWEN_1_5B, "1.5B"), shape_of(QWEN_7B, "7B")


def items_of(budget: Budget) -> dict[str, float]:
    return {item.name: item.num_bytes for item in budget.items}


def budgets_of(
    config: Config, shape: ModelShape = SHAPE_1_5B, gpu_gib: float = 80, prompt_tokens: int = 256
) -> tuple[Budget, Budget]:
    """Return the budgets of a Generator and of the Learner."""
    arguments = (shape, config, prompt_tokens, gpu_gib * GIB)
    return gpu_memory.generator_budget(*arguments), learner_memory.learner_budget(*arguments)


def test_figures_of_1_5b_by_hand() -> None:
    plain, of_nccl = budgets_of(plan_config()), budgets_of(plan_config(weight_sync={"transport": "nccl"}))
    generator, learner = map(items_of, plain)
    parameters = 1_543_714_304
    assert learner["weights"] == learner["gradients"] == 4 * parameters
    assert (learner["copy of the weights"], learner["AdamW's moments"]) == (2 * parameters, 8 * parameters)
    # 4,096 tokens of one group: a prompt of 256, and 3,840 of its responses. Each layer keeps its bfloat16
    # input, the last norm a float32 copy and what it scales. A chunk of 2^28 bytes holds 441 positions' logits.
    assert learner["activations"] == 28 * 4096 * 2 * 1536 + 4096 * 6 * 1536
    assert learner_memory.CHUNK_BYTES == chunked.CHUNK_BYTES == 2**28
    assert learner_memory.COMPILED_CHUNK_BYTES == chunked.COMPILED_CHUNK_BYTES
    # Half of that more in bfloat16, as of the weights' gradient, and the responses' states with their gradient.
    assert learner["output layer"] == 1.5 * 4 * 151_936 * (441 + 1536) + 2 * 2 * 3840 * 1536
    assert generator["weights"] == 2 * parameters
    assert generator["KV cache"] == 512 * 1280 * (2 * 28 * 2 * 128 * 2)  # sequences, tokens, bytes per token
    # Weights, their copy and the moments are moved, 14 bytes per parameter; the gradients are freed.
    together = plan_config(generator={"colocated": True}, weight_sync={"max_lag": 0})
    assert "20.1 GiB for the Generators' turn, " in budgets_of(together)[1].remark
    on_cpu = plan_config(learner={"num_gpus": 0}, generator={"num_gpus": 0, "kv_cache_gib": 1.0})
    assert budgets_of(on_cpu)[1].remark == ""
    kept = plan_config(weight_sync={"transport": "collective", "delta": True})  # two to send, one for the delta
    assert " 8.6 GiB for 3 snapshots, 2.9 GiB for each" in budgets_of(kept)[1].remark
    adapted = plan_config(weight_sync={"send": "adapter"}, model={"adapter": {"rank": 16}})
    assert " 35 MiB for a snapshot" in budgets_of(adapted)[1].remark
    # NCCL keeps two copies on the Learner's GPU and none on the Generators'.
    assert of_nccl[1].needed_bytes - plain[1].needed_bytes == 2 * 2 * parameters
    assert of_nccl[0] == plain[0]


@pytest.mark.parametrize(
    ("options", "gib"), [({}, 51.4), ({"gradient_checkpointing": "selective"}, 39.7), ({"compile": True}, 44.7)]
)
def test_the_plan_is_what_an_h100_took(options: dict[str, Any], gib: float) -> None:
    """The peaks of docs/lab/gpu.md, which are torch's own: without CUDA's context."""
    long = {"sampling": {"max_tokens": 8192}, "algorithm": {"prompts_per_step": 1, "samples_per_prompt": 8}}
    options = {"micro_batch_tokens": 8192, "gradient_checkpointing": "none", **options}
    learner = budgets_of(plan_config(**long, learner=options), prompt_tokens=512)[1]
    assert learner.remark.startswith("host memory: 17.3 GiB for checkpoints, 2.9 GiB for a snapshot, 2.9 GiB ")
    assert sum(item.num_bytes for item in learner.items) / 2**30 - 1 == pytest.approx(gib, rel=0.01)


def test_the_kv_cache_is_divided_among_gpus_and_sequences_are_limited_by_those_in_flight() -> None:
    of_gpus = [plan_config(generator={"num_gpus": n}) for n in (1, 2, 4, 8)]  # 4 key-value heads
    assert [gpu_memory.kv_bytes_per_token(SHAPE_7B, config) / 1024 for config in of_gpus] == [56, 28, 14, 14]
    few = plan_config(algorithm={"prompts_per_step": 4}, weight_sync={"max_lag": 2})
    assert concurrent_sequences(few) == (1 + 2) * 4 * 8
    assert concurrent_sequences(changed(few, generator={"num_generators": 2})) == 48
    assert concurrent_sequences(changed(few, generator={"max_num_seqs": 7})) == 7


def test_a_cache_with_less_than_a_sequence_does_not_fit_and_one_with_more_takes_what_is_left() -> None:
    config, sequence = plan_config(generator={"gpu_memory_utilization": 1.0}), 1280 * 28 * 1024
    others = 2 * SHAPE_1_5B.num_parameters + ENGINE_BYTES
    scarce, tight = (budgets_of(config, gpu_gib=(others + n * sequence) / GIB)[0] for n in (0.9, 1.5))
    assert scarce.missing_bytes == pytest.approx(0.1 * sequence)
    assert not scarce.fits
    assert "the engine would refuse to start" in scarce.remark
    assert items_of(tight)["KV cache"] == pytest.approx(1.5 * sequence)
    assert tight.fits
    assert "room for 1 of up to 512 concurrent sequences" in tight.remark


def test_a_micro_batch_holds_one_sequence_at_least_and_no_more_than_there_are() -> None:
    config = plan_config(learner={"micro_batch_tokens": 100})
    assert largest_micro_batch(config, 256) == Tokens(1280, 1024, 1280 + 256)
    config = plan_config()  # with 4,096 tokens: a group that is split keeps one prompt
    assert largest_micro_batch(config, 256) == Tokens(4096, 3840, 4096 + 3840 * 256 // 1024)
    config = plan_config(learner={"micro_batch_tokens": 10**6}, algorithm={"train_batch_size": 64})
    # 64 of 256 responses are two of each group's eight.
    assert largest_micro_batch(config, 256) == Tokens(32 * (256 + 2 * 1024), 64 * 1024, 32 * (256 + 2 * 1280))
    config = changed(config, learner={"share_prompts": "never"})
    assert largest_micro_batch(config, 256) == Tokens(64 * 1280, 64 * 1024, 64 * 1280)


@settings(max_examples=60)
@given(
    share=st.floats(0.3, 1.0), gpu_gib=st.sampled_from([24.0, 48.0, 80.0, 141.0]), is_large=st.booleans(),
    transport=st.sampled_from(["ipc", "object_store"]), has_adapter=st.booleans(),
)  # fmt: skip
def test_a_colocated_turn_fits_if_each_of_its_phases_does(
    share: float, gpu_gib: float, is_large: bool, transport: str, has_adapter: bool
) -> None:
    """vLLM holds its whole share while it samples, whatever it needs, and an `ipc` snapshot lies beside it."""
    model = {"adapter": {"rank": 8} if has_adapter else None}
    generator = {"colocated": True, "gpu_memory_utilization": share}
    sync = {"max_lag": 0, "transport": transport}
    config = plan_config(model=model, generator=generator, weight_sync=sync)
    shape = SHAPE_7B if is_large else SHAPE_1_5B
    weights = 2 * shape.num_parameters
    snapshot = weights if transport == "ipc" else 0
    sequence = 1280 * gpu_memory.kv_bytes_per_token(shape, config)
    engine = max(share * gpu_gib * GIB, weights + ENGINE_BYTES + sequence)  # it needs room for one sequence
    training = sum(item.num_bytes for item in (*state_items(shape, config), *working_items(shape, config, 256)))
    phases = {
        "sample, and pack the first snapshot": engine + snapshot + CONTEXT_BYTES,
        "train": training + CONTEXT_BYTES + ENGINE_BYTES,
        "pack": training + snapshot + CONTEXT_BYTES + ENGINE_BYTES,
        "wake and load": weights + snapshot + CONTEXT_BYTES + ENGINE_BYTES,
    }
    generator, learner = budgets_of(config, shape, gpu_gib)
    assert (generator.fits and learner.fits) == (max(phases.values()) <= gpu_gib * GIB)
    advised = re.search(r"generator.gpu_memory_utilization: (0\.\d+)", generator.remark)
    if not generator.fits and advised:
        fitting = changed(config, generator={"gpu_memory_utilization": float(advised[1])})
        found = budgets_of(fitting, shape, gpu_gib)[0]
        assert found.fits or "no room for one sequence" in found.remark


# ---- ranks, by hand ----


def learner_items(shape: ModelShape = SHAPE_7B, **changes: dict[str, Any]) -> dict[str, float]:
    return items_of(budgets_of(plan_config(**changes), shape)[1])


def test_ranks_divide_the_state_and_nothing_else() -> None:
    one, several = learner_items(), learner_items(learner={"num_ranks": 12, "replicas": 3})
    for name in ("weights", "gradients", "AdamW's moments"):
        assert 4 * several[name] == one[name]  # the ranks of a replica hold one copy
    for name in ("activations", "output layer"):
        assert several[name] == one[name]
    assert "copy of the weights" not in several  # but for what is gathered
    assert "copy of the weights" not in learner_items(model={"dtype": "float32"})
    assert set(several) - set(one) == {"gathered weights", "unreduced gradients"}
    for reference, width in (("initial", 2), ("ema", 4)):  # one that moves has float32 weights
        found = learner_items(learner={"num_ranks": 4}, algorithm={"kl": {"reference": reference}})
        assert found["reference"] == width * SHAPE_7B.num_parameters / 4


def test_figures_of_7b_on_eight_ranks_by_hand() -> None:
    found, parameters = learner_items(learner={"num_ranks": 8}), 7_615_616_512
    assert found["weights"] == found["gradients"] == 4 * parameters / 8
    assert found["AdamW's moments"] == 8 * parameters / 8
    embedding = 152_064 * 3584  # and an output layer of that size
    block = 3584 * 2 * (3584 + 512) + 3 * 3584 * 18_944 + (3584 + 2 * 512) + 2 * 3584
    assert 2 * embedding + 28 * block + 3584 == parameters
    root = 2 * embedding + 3584
    assert found["gathered weights"] == 2 * (root + root / 8 + 3 * block)
    assert found["unreduced gradients"] == 2 * embedding + (2 + 4 + 4 / 8 + 4) * block
    budget = budgets_of(plan_config(learner={"num_ranks": 8}), SHAPE_7B)[1]
    assert budget.device == "the GPU of each of the Learner's 8 ranks"
    assert budget.remark == (  # an eighth of 12 bytes, and then whole copies of 2 and 4
        "host memory: 10.6 GiB for checkpoints, 14.2 GiB for a snapshot, 14.2 GiB for each Generator's copy, "
        "28.4 GiB for loading in float32, on rank 0"
    )


def test_the_roots_gradient_is_the_peak_where_a_pass_takes_less() -> None:
    """Here a large vocabulary meets small blocks and few tokens."""
    shape = replace(SHAPE_7B, intermediate_size=1024)
    changes = {"sampling": {"max_tokens": 64}, "algorithm": {"prompts_per_step": 1}}
    found = learner_items(shape, learner={"num_ranks": 8}, **changes)
    root = 2 * 152_064 * 3584 + 3584
    block = 3584 * 2 * (3584 + 512) + 3 * 3584 * 1024 + (3584 + 2 * 512) + 2 * 3584
    assert found["gathered weights"] == 2 * (root + root / 8)
    assert found["unreduced gradients"] == (2 + 4 + 4 / 8) * root + 4 * block
    assert not {"activations", "output layer"} & set(found)


def test_a_base_of_4_bits_is_whole_on_every_rank_and_one_of_16_is_sharded() -> None:
    adapter = {"rank": 16, "alpha": 32}
    trained = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    nf4 = {"adapter": adapter, "base_quantization": "nf4"}
    whole, one = (learner_items(model=nf4, learner={"num_ranks": n}) for n in (4, 1))
    assert whole["base"] == one["base"]
    assert whole["adapter"] == (4 + 4 + 8) * trained / 4
    assert whole["gathered weights"] == 3 * 2 * trained // 28
    sharded = learner_items(model={"adapter": adapter}, learner={"num_ranks": 4})
    assert sharded["base"] == 2 * SHAPE_7B.num_parameters / 4
    assert sharded["unreduced gradients"] == whole["unreduced gradients"] == (2 + 4 + 4 / 4 + 4) * trained // 28


def planned(capsys: Capture, config: str, *arguments: str, status: int = 0) -> str:
    words = ("plan", config, *(SMALL_BATCHES if config == QWEN else ()), *arguments)
    return printed(capsys, *words, status=status)


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend in bfloat16, as GPUs do, which the plans are for."""
    monkeypatch.setattr("grpo_ray.learning.attention.SHORT", 0)


def folder_of(tmp_path: Path, config: dict[str, Any]) -> str:
    """Return an override of `model.path` with a folder that holds only this config.json."""
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return f"model.path={tmp_path / 'model'}"


def test_7b_does_not_fit_one_24_gb_gpu_and_1_5b_asks_for_two(tmp_path: Path, capsys: Capture) -> None:
    on_one = ("--gpus", "1", "--gpu-memory", "24", *ON_ONE_GPU)
    shown = planned(capsys, QWEN, folder_of(tmp_path, QWEN_7B), *on_one, status=1)
    # 7,615,616,512 x 18 bytes are 127.67 GiB; the gradient of the output layer takes 3.0 GiB more, and
    # contexts, asleep or not, another 3.
    assert "DOES NOT FIT: 111.0 GiB too much; the largest item is AdamW's moments (56.7 GiB)" in shown
    assert shown.endswith("does not fit: the GPU, in the Learner's turn\n")
    needed = "the run needs 2 GPUs, but --gpus is 1; lower generator.num_generators, "
    assert needed in planned(capsys, QWEN, folder_of(tmp_path, QWEN_1_5B), "--gpus", "1", status=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "it fits with learner.num_ranks=2: 70.0 GiB per rank"),
        (("--gpu-memory", "24"), "it fits with learner.num_ranks=16: 19.1 GiB per rank"),
        (
            ("--gpu-memory", "24", *ON_ONE_GPU),
            "it fits with learner.num_ranks=16 generator.num_generators=16: 21.1 GiB",
        ),
        (("--gpu-memory", "5"), "more ranks (learner.num_ranks) are not enough; use a lower learner.micro"),
        (("learner.moments=8bit",), "it may fit with a lower learner.micro_batch_tokens"),
    ],
)
def test_a_learner_that_does_not_fit_has_a_remedy(
    overrides: tuple[str, ...], message: str, tmp_path: Path, capsys: Capture
) -> None:
    shown = planned(capsys, QWEN, folder_of(tmp_path, QWEN_7B), *overrides, status=1)
    assert f"! the Learner does not fit; {message}" in shown


@pytest.mark.parametrize("config", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_here_can_be_planned(config: Path, tmp_path: Path) -> None:
    overrides = () if load_config(config).model.tiny else (folder_of(tmp_path, QWEN_1_5B),)
    assert plan_memory(PlanOptions(str(config), overrides)).fits


def test_a_cpus_kv_cache_must_hold_a_sequence(capsys: Capture) -> None:
    assert "DOES NOT FIT" in planned(capsys, QUICKSTART, "generator.kv_cache_gib=0.0005", status=1)
    shown = planned(capsys, QUICKSTART)
    assert "no verdict without a GPU; the largest item is activations (418 MiB)" in shown
    assert shown.endswith("\nfits; the run uses no GPU\n")


def test_the_longest_prompt_is_what_the_models_length_leaves(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN_1_5B)
    given = PlanOptions(QWEN, (folder,), prompt_tokens=100)
    limited = PlanOptions(QWEN, (folder, "generator.max_model_len=1500"))
    plans = map(plan_memory, (given, replace(given, prompt_tokens=None), limited))
    assert [plan.work.prompt_tokens for plan in plans] == [100, 256, 1500 - 1024]


@pytest.mark.slow
def test_a_plan_and_the_start_of_an_experiment_need_neither_torch_nor_ray(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_ray.tools.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'transformers', 'vllm'} & set(sys.modules); "
        "import grpo_ray.tools.experiments.run_experiment; "
        "print(sorted({'torch', 'ray', 'matplotlib'} & set(sys.modules)))"
    )
    output = output_of(sys.executable, "-c", code, "plan", QWEN, folder_of(tmp_path, QWEN_1_5B))
    assert output.splitlines()[-1] == "[]"


def measure_rank(rank: int, backend: str, num_ranks: int, port: int, sizes: dict[str, Any], found: str) -> None:
    """Write the bytes of rank 0's shards after a step, and of a pass's peak over two tokens."""
    store = FakeStore() if backend == "fake" else dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), attn_implementation="sdpa")
    ranks = Ranks(None)
    ranks._mesh = init_device_mesh("cpu", (num_ranks,))
    ranks.shard(model, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.tensor([[1, 2]])

    def compute() -> None:
        model(input_ids=tokens).logits[:, :1].float().logsumexp(-1).sum().backward()

    compute()
    optimizer.step()
    peak = peak_bytes(compute)
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    state = model.parameters(), [p.grad for p in model.parameters()], moments
    sums = [sum(tensor.to_local().nbytes for tensor in tensors) for tensors in state]  # all are shards
    if rank == 0:
        Path(found).write_text(" ".join(map(str, [*sums, peak])))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 512), (2, 32768), (3, 32768)])
@pytest.mark.parametrize("backend", ["fake", "gloo"])
@pytest.mark.kept("fake-2-512")
def test_a_rank_holds_what_is_planned(backend: str, num_ranks: int, vocab_size: int, tmp_path: Path) -> None:
    """With few tokens of a large vocabulary the peak is where the root's gradient is reduced.

    Otherwise it is where blocks are. Which of a neighbour's buffers are freed by then differs from run to run:
    at most one more block's are held than planned. The fake backend sends nothing, and needs no copy to reduce.
    """
    sizes = {**SMALL, "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}
    sizes |= {"vocab_size": vocab_size, "model_type": "llama", "tie_word_embeddings": False, "use_cache": False}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    found = tmp_path / "found"
    arguments = (backend, num_ranks, port, sizes, str(found))
    if backend == "fake":
        measure_rank(0, *arguments)
    else:
        torch.multiprocessing.spawn(measure_rank, arguments, nprocs=num_ranks)
    *state, peak = map(int, found.read_text().split())
    shape, config = shape_of(sizes, "x"), plan_config(learner={"num_ranks": num_ranks})
    uneven = 0.005 if num_ranks == 3 else 0.0  # the first of three ranks has a row more of some matrices
    assert state == pytest.approx([item.num_bytes for item in state_items(shape, config)], rel=uneven)
    items = learner_memory.with_unsharded([], shape, config)
    planned = sum(item.num_bytes for item in items)
    if vocab_size == 32768 and backend == "gloo":
        assert "after the backward pass" in items[-1].note
        assert planned == pytest.approx(peak, rel=0.08)
    else:
        one_more = (2 + 4) * shape.block_parameters  # gathered in bfloat16, to reduce in float32
        least = (0.6 if backend == "gloo" else 0.5) * planned  # oneDNN's scratch differs by processor
        assert least <= peak <= planned + 1.1 * one_more


def test_more_responses_than_memory_holds_are_refused() -> None:
    for sizes in (["prompts_per_step=100000000"], ["prompts_per_step=1000", "samples_per_prompt=16000"]):
        with pytest.raises(ConfigError, match=r"prompts_per_step \(.*0 responses per step.*at most 4,194,304"):
            make_config(*(f"algorithm.{size}" for size in sizes))
    config = make_config("evaluation.samples_per_prompt=16000", "task.num_validation_prompts=4000")
    with pytest.raises(ValueError, match=r"evaluation\.samples_per_prompt: 16,000 responses to each of 4"):
        check_files(config)


@pytest.mark.slow
def test_the_driver_answers_while_a_very_large_step_is_dispatched(tmp_path: Path) -> None:
    num_groups = 5 * SLICE
    seen: list[int] = []

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.live_status().num_sampling > 0)
        seen.append(controller.live_status().num_sampling)
        controller.stop()
        await until(lambda: False)

    train(make_config(f"algorithm.prompts_per_step={num_groups}"), tmp_path / "run", meddle)
    assert 0 < seen[0] < num_groups
