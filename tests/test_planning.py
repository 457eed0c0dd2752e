"""Plans against what torch allocates, what models have, what a run measured, and figures by hand."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import ENDS, changed, make_batch
from local_runs import make_config as make_run_config
from local_runs import train
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from grpo_ray.actors.learner import Learner
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.model import TinyModelConfig
from grpo_ray.errors import RunError
from grpo_ray.policy.forward_backward import ForwardBackward
from grpo_ray.policy.microbatch import TrainSequence
from grpo_ray.policy.tiny import build_model, tiny_tokenizer
from grpo_ray.policy.transformer_lm import TransformerLM
from grpo_ray.telemetry.run_files import dump_config
from grpo_ray.tools.cli import main
from grpo_ray.tools.planning.budget import GIB, Budget, Item, gib
from grpo_ray.tools.planning.devices import Hardware, device_budgets
from grpo_ray.tools.planning.generator_memory import kv_demand
from grpo_ray.tools.planning.known_shapes import KNOWN, find_shape, known_shape
from grpo_ray.tools.planning.learner_memory import (
    MicroBatchTokens,
    kept_per_token,
    micro_batch_tokens,
    state_items,
    working_items,
)
from grpo_ray.tools.planning.make_plan import PlanOptions, make_plan
from grpo_ray.tools.planning.model_shape import ModelShape, shape_of, shape_of_tiny
from grpo_ray.tools.planning.rates import MeasuredRun, Rates, measure
from grpo_ray.tools.planning.report import compare_memory
from grpo_ray.tools.planning.step_time import StepTime, best, splits, step_time
from grpo_ray.types import TrainBatch

QWEN = "configs/qwen2.5-math-1.5b.yaml"
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


def plan_config(**changes: dict[str, Any]) -> Config:
    """configs/qwen2.5-math-1.5b.yaml, changed."""
    return changed(load_config(QWEN), **changes)


def small_model(family: str = "qwen2", **sizes: int) -> tuple[PreTrainedModel, ModelShape]:
    data = {**SMALL, **FAMILIES[family], **sizes}
    kind = data["model_type"]
    config = AutoConfig.for_model(**data)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"), shape_of(data, kind)


# ---- shapes ----


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str) -> None:
    with torch.device("meta"):
        model, shape = small_model(family)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n}
    output = matrices.pop("lm_head.weight", 0) or model.lm_head.weight.numel()
    assert shape.multiplied == sum(matrices.values()) + output


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-math-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-14b", 14_770_033_664),
        ("qwen2.5-32b", 32_763_876_352),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, published: int) -> None:
    assert known_shape(name).num_parameters == published


@pytest.mark.parametrize("implementation", ["transformers", "grpo_ray"])
def test_a_tiny_model_has_the_parameters_it_is_planned_with(tiny_config: Config, implementation: Any) -> None:
    tiny = TinyModelConfig(hidden_size=64, num_layers=2, intermediate_size=96, vocab_size=300, warmup=None)
    model = build_model(tiny, tiny_tokenizer(tiny_config), 0, implementation)
    vocab_size = model.get_parameter("model.embed_tokens.weight").shape[0]
    shape = replace(shape_of_tiny(tiny, implementation), vocab_size=vocab_size)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_shape_is_found_by_option_folder_and_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama"}))
    config = plan_config(model={"path": str(tmp_path)})
    assert find_shape(config).hidden_size == 64
    assert find_shape(config, "qwen2.5-7b").hidden_size == 3584
    assert find_shape(plan_config()) == known_shape("qwen2.5-math-1.5b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "no mapping"),
        ('{"model_type": "mamba"}', "'mamba'; a plan knows llama"),
        ('{"model_type": "llama", "hidden_size": 0}', "hidden_size is 0"),
    ],
)
def test_a_config_json_of_no_use_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        find_shape(plan_config(model={"path": str(tmp_path)}))


@pytest.mark.parametrize("path", ["nobody/no-such-model", "/no/such/folder"])
def test_a_model_that_is_not_here_is_said_to_be_named_otherwise(path: str) -> None:
    with pytest.raises(ValueError, match="--model-shape"):
        find_shape(plan_config(model={"path": path}))


# ---- the Learner: against torch ----


def kept_bytes(model: Any, dtype: str, matrices: int) -> float:
    """What torch keeps of a forward pass for the backward one, without weights and their copies."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages, kept = {}, []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # or its address would be used again
        return tensor

    is_cast = dtype != "float32"
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        _ = model(input_ids=torch.randint(0, 300, (2, 64)), use_cache=False, logits_to_keep=1).logits
    return sum(storages.values()) - is_cast * 2 * matrices


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama with wide heads", "grpo_ray"])
def test_a_layer_keeps_as_many_bytes_of_a_token_as_planned(family: str, dtype: str) -> None:
    config = plan_config(model={"dtype": dtype, "implementation": "transformers"})
    kept = []
    for num_layers in (2, 3):
        if family == "grpo_ray":
            config = changed(config, model={"implementation": "grpo_ray"})
            made, shape = small_model("llama", num_hidden_layers=num_layers)
            model: Any = TransformerLM(made.config)
        else:
            model, shape = small_model(family, num_hidden_layers=num_layers)
        kept.append(kept_bytes(model, dtype, num_layers * shape.layer_matrices))
    # Besides, Qwen3's head norms keep a number a head, TransformerLM each layer's rotation.
    tolerance = {"qwen3": 0.01, "grpo_ray": 0.02}.get(family, 0)
    assert (kept[1] - kept[0]) / (2 * 64) == pytest.approx(kept_per_token(shape, config), rel=tolerance)


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch held at a time of what `work` allocated."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    assert profile.profiler is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return int(np.cumsum(sizes).max())


@pytest.mark.parametrize(
    ("dtype", "is_checkpointed", "vocab_size", "entropy_bonus", "is_own"),
    [
        ("float32", False, 320, 0.0, False),
        ("float32", False, 8192, 0.0, False),
        ("float32", True, 320, 0.0, False),
        ("float32", True, 8192, 0.1, False),
        ("bfloat16", False, 320, 0.0, False),
        ("bfloat16", True, 8192, 0.0, False),
        ("float32", False, 320, 0.0, True),
        ("bfloat16", True, 320, 0.0, True),
    ],
)
def test_a_micro_batch_takes_what_is_planned(
    dtype: str, is_checkpointed: bool, vocab_size: int, entropy_bonus: float, is_own: bool
) -> None:
    num_rows, num_prompt, num_response = 16, 8, 40
    config = plan_config(
        model={"dtype": dtype, "implementation": "grpo_ray" if is_own else "transformers"},
        sampling={"max_tokens": num_response},
        algorithm={"entropy_bonus": entropy_bonus},
        learner={
            "micro_batch_tokens": num_rows * (num_prompt + num_response),
            "gradient_checkpointing": is_checkpointed,
        },
    )
    made, shape = small_model("llama", vocab_size=vocab_size, num_hidden_layers=6, hidden_size=128)
    model: Any = TransformerLM(made.config) if is_own else made
    if is_checkpointed:
        model.train()
        model.gradient_checkpointing_enable()
    rng = np.random.default_rng(0)
    behaviour = np.full(num_response, -3.0, np.float32)
    sequences = [
        TrainSequence(
            tuple(rng.integers(0, 300, num_prompt)), rng.integers(0, 300, num_response), behaviour, 1.0
        )
        for _ in range(num_rows)
    ]
    forward_backward = ForwardBackward(config, ENDS, torch.device("cpu"))
    forward_backward.backward(model, sequences)  # the gradients are there from here on
    measured = peak_bytes(lambda: forward_backward.backward(model, sequences))
    tokens = micro_batch_tokens(config, num_prompt)
    assert tokens == MicroBatchTokens(num_rows * 48, num_rows * 40)
    planned = sum(item.num_bytes for item in working_items(shape, config, tokens))
    is_layer_the_fullest = is_checkpointed and vocab_size == 320  # of whose gradients the plan has a part
    assert planned == pytest.approx(measured, rel=0.12 if is_layer_the_fullest else 0.02)


@pytest.mark.parametrize("reference", ["none", "initial", "ema"])
def test_the_state_is_what_a_learner_holds(
    tiny_config: Config, tiny_model: Callable[..., Path], reference: str
) -> None:
    config = changed(tiny_config, model={"dtype": "bfloat16"}, algorithm={"kl": {"reference": reference}})
    learner = Learner(str(tiny_model(True)), config, ENDS)
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    parameters = list(learner.model.parameters())
    held: list[torch.Tensor] = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    held += [m for state in learner._optimizer.state.values() for m in state.values() if m.ndim]
    held += list(learner._reference.model.parameters()) if learner._reference else []
    shape = shape_of(json.loads((tiny_model(True) / "config.json").read_text()), "tiny")
    items = state_items(shape, config)
    assert sum(item.num_bytes for item in items) == sum(t.numel() * t.element_size() for t in held)


STEP = r"""
import re, sys
from pathlib import Path
import numpy as np
import ray
from builders import make_completion, make_group, make_item
from grpo_ray.actors.learner import Learner
from grpo_ray.config.loading import load_config
from grpo_ray.types import TrainBatch
path, config, overrides = sys.argv[1], sys.argv[2], sys.argv[3:]
learner = Learner(path, load_config(config, overrides), (0,))
rng = np.random.default_rng(0)
def group(group_id):
    answers = [make_completion(rng.integers(1, 280, 24).tolist(), versions=learner.version) for _ in range(8)]
    return make_group(make_item(group_id, [3] * 14), answers, [1, 0] * 4, [1.0, -1.0] * 4)
learner.train_step(TrainBatch(tuple(map(group, range(16)))))
status = Path("/proc/self/status").read_text()  # getrusage would count what pytest held when it forked
print(int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024)
"""


def test_a_learners_process_is_as_large_as_planned(tiny_model: Callable[..., Path]) -> None:
    """A process of its own does half of the quickstart's step, with another model."""
    path = tiny_model(True, hidden_size=256)
    overrides = ["model.tiny=null", f"model.path={path}", "algorithm.prompts_per_step=16"]
    step = subprocess.run(
        [sys.executable, "-c", STEP, str(path), "configs/quickstart.yaml", *overrides],
        capture_output=True, text=True, check=True, env=_environment(),
    )  # fmt: skip
    plan = make_plan(PlanOptions("configs/quickstart.yaml", overrides, prompt_tokens=14))
    learner = [item for item in plan.budgets[-1].items if item.process == "Learner"]
    planned = sum(i.num_bytes for i in learner if i.name not in ("snapshot", "a checkpoint's copy"))
    assert planned == pytest.approx(int(step.stdout), rel=0.2)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}


# ---- figures by hand ----


def items_of(budget: Budget) -> dict[str, float]:
    return {item.name: item.num_bytes for item in budget.items}


def budgets_of(config: Config, name: str = "qwen2.5-math-1.5b", gpu_gib: float = 80) -> dict[str, Budget]:
    found = device_budgets(known_shape(name), config, Hardware(2, gpu_gib * GIB, None), prompt_tokens=256)
    return {budget.owner: budget for budget in found}


def test_figures_of_1_5b_by_hand() -> None:
    budgets = budgets_of(plan_config())
    parameters, learner = 1_543_714_304, items_of(budgets["Learner"])
    assert learner["weights"] == learner["gradients"] == 4 * parameters
    assert learner["AdamW's moments"] == 8 * parameters
    # 4,096 tokens of sequences of 256 + 1,024: 3,277 response positions; five copies of their logits, and the
    # output layer's weights in bfloat16. Of each layer its float32 input.
    assert learner["logits"] == 5 * 4 * 3277 * 151_936 + 2 * 151_936 * 1536
    assert learner["activations"] == 28 * 4096 * 4 * 1536
    generator = items_of(budgets["Generator"])
    assert generator["weights"] == 2 * parameters
    assert generator["KV cache"] == 256 * 1280 * (2 * 28 * 2 * 128 * 2)  # sequences, tokens, bytes of a token


def test_kv_cache_is_shared_by_a_generators_gpus_and_limited_by_what_is_in_flight() -> None:
    shape = known_shape("qwen2.5-7b")  # 4 key-value heads
    assert [
        kv_demand(shape, plan_config(generator={"num_gpus": n}), 256).bytes_per_token / 1024
        for n in (1, 2, 4, 8)
    ] == [56, 28, 14, 14]
    few = plan_config(algorithm={"prompts_per_step": 4}, weight_sync={"max_lag": 2})
    assert kv_demand(shape, few, 256).num_wanted == (1 + 2) * 4 * 8
    halved = changed(few, generator={"num_generators": 2})
    assert kv_demand(shape, halved, 256).num_wanted == 48


def test_a_cache_with_less_than_a_sequence_does_not_fit_and_one_with_more_takes_what_is_left() -> None:
    config, sequence = plan_config(generator={"gpu_memory_utilization": 1.0}), 1280 * 28 * 1024
    roomy = budgets_of(config)["Generator"]
    fixed = roomy.needed_bytes - items_of(roomy)["KV cache"]
    scarce, tight = (
        budgets_of(config, gpu_gib=(fixed + room) / GIB)["Generator"]
        for room in (0.9 * sequence, 1.5 * sequence)
    )
    assert scarce.missing_bytes == pytest.approx(0.1 * sequence)
    assert not scarce.fits
    assert items_of(tight)["KV cache"] == pytest.approx(1.5 * sequence)
    assert tight.fits
    assert tight.remarks[0].startswith("1 of the 256 sequences")


def test_a_micro_batch_holds_one_sequence_at_least_and_no_more_than_there_are() -> None:
    config = plan_config(learner={"micro_batch_tokens": 100})
    assert micro_batch_tokens(config, 256) == MicroBatchTokens(1280, 1024)
    config = plan_config(learner={"micro_batch_tokens": 10**6}, algorithm={"train_batch_size": 4})
    assert micro_batch_tokens(config, 256) == MicroBatchTokens(4 * 1280, 4 * 1024)


def test_ema_and_snapshot_in_place_take_their_room() -> None:
    parameters = known_shape("qwen2.5-math-1.5b").num_parameters
    plain = budgets_of(plan_config())
    ema = budgets_of(plan_config(algorithm={"kl": {"reference": "ema"}}))
    assert ema["Learner"].needed_bytes - plain["Learner"].needed_bytes == 4 * parameters
    assert ema["host"].needed_bytes - plain["host"].needed_bytes == 4 * parameters  # in a checkpoint's copy
    turns = {"generator": {"colocated": True}, "weight_sync": {"max_lag": 0}}
    stored = budgets_of(plan_config(**turns))
    turns["weight_sync"]["transport"] = "ipc"
    shared = budgets_of(plan_config(**turns))
    assert shared["Learner"].needed_bytes - stored["Learner"].needed_bytes == 2 * parameters
    # Not in Learner, Generator and object store any more.
    assert stored["host"].needed_bytes - shared["host"].needed_bytes == 3 * 2 * parameters


def test_colocated_vllm_leaves_room_for_the_learners_context() -> None:
    turns = {"generator": {"colocated": True, "gpu_memory_utilization": 1.0}, "weight_sync": {"max_lag": 0}}
    assert budgets_of(plan_config(**turns))["Generator"].capacity_bytes == 79 * GIB
    turns["generator"]["gpu_memory_utilization"] = 0.85
    assert budgets_of(plan_config(**turns))["Generator"].capacity_bytes == 68 * GIB


def test_the_learner_on_a_small_batch_is_at_its_fullest_in_adamws_step() -> None:
    items = items_of(budgets_of(plan_config(), "qwen2.5-7b")["Learner"])
    assert items["AdamW's temporaries"] == 4 * 7_615_616_512
    assert "logits" not in items


def test_a_budget_says_how_much_is_missing() -> None:
    items = [Item("a", 3 * GIB), Item("b", 2 * GIB)]
    assert Budget("host", "x", items, 4 * GIB).missing_bytes == GIB
    assert Budget("host", "x", items, 5 * GIB).fits
    assert Budget("host", "x", items, None).fits
    assert (gib(1.5 * GIB), gib(GIB / 2)) == ("1.5 GiB", "512 MiB")


# ---- verdicts ----


def run(*arguments: str) -> int:
    return main(["plan", *arguments])


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[str], str]:
    """`folder_of(name)`: an override of `model.path` with a folder that holds a config.json alone."""

    def folder(name: str) -> str:
        path = tmp_path / f"model-of-{name}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(KNOWN[name]))
        return f"model.path={path}"

    return folder


def test_7b_does_not_fit_one_24_gb_gpu(
    folder_of: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(QWEN, folder_of("qwen2.5-7b"), *ON_ONE_GPU, "--gpus", "1", "--gpu-memory", "24") == 1
    printed = capsys.readouterr().out
    assert "DOES NOT FIT: 120.9 GiB too much" in printed
    assert "take a smaller model or a larger GPU" in printed
    assert printed.endswith("does not fit: the GPU, in the Learner's turn\n")


@pytest.mark.parametrize("arguments", [("--gpus", "2"), ("--gpus", "1", *ON_ONE_GPU)])
def test_1_5b_fits_80_gb(
    folder_of: Callable[[str], str], capsys: pytest.CaptureFixture[str], arguments: Sequence[str]
) -> None:
    assert run(QWEN, folder_of("qwen2.5-math-1.5b"), "--gpu-memory", "80", *arguments) == 0
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" not in printed
    assert "\nfits: " in printed


def test_too_few_gpus_are_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(QWEN, "--gpus", "1") == 1
    printed = capsys.readouterr().out
    assert "2 GPUs are needed and 1 is there" in printed
    assert "generator.colocated=true" in printed
    assert run(QWEN, "generator.num_generators=3", "--gpus", "2") == 1
    assert "lower generator.num_generators" in capsys.readouterr().out


def test_hosts_are_judged_by_the_memory_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(QWEN, "--host-memory", "200") == 0
    assert run(QWEN, "--host-memory", "8") == 1
    assert capsys.readouterr().out.endswith("does not fit: the host's memory\n")


@pytest.mark.parametrize("config", sorted(Path("configs").glob("*.yaml")))
def test_every_configuration_here_can_be_planned(config: Path) -> None:
    assert make_plan(PlanOptions(str(config), host_memory_gib=100)).fits


@pytest.mark.parametrize(
    ("gpu_gib", "owner", "changes"),
    [
        (40, "Learner", {"learner": {"micro_batch_tokens": 8192, "gradient_checkpointing": False}}),
        (32, "Learner", {"learner": {"micro_batch_tokens": 16384, "gradient_checkpointing": False}}),
        (36, "Learner", {"algorithm": {"kl": {"reference": "ema"}}}),
        (6, "Generator", {}),
        (4, "Generator", {}),
    ],
)
def test_what_a_remedy_names_makes_it_fit(gpu_gib: float, owner: str, changes: dict[str, Any]) -> None:
    config = plan_config(**changes)
    path = [
        f"{section}.{key}={json.dumps(value)}" for section, of in changes.items() for key, value in of.items()
    ]
    options = PlanOptions(QWEN, path, gpu_memory_gib=gpu_gib)
    plan = make_plan(options)
    assert plan.config == config
    budget = next(b for b in plan.budgets if b.owner == owner)
    assert not budget.fits
    remedy = plan.remedy(budget)
    assert remedy.startswith("would fit with ")
    better = make_plan(replace(options, overrides=[*path, *remedy.removeprefix("would fit with ").split()]))
    assert next(b for b in better.budgets if b.owner == owner).fits


def test_a_cpus_kv_cache_must_hold_a_sequence() -> None:
    options = PlanOptions("configs/quickstart.yaml", ["generator.kv_cache_gib=0.0005"], host_memory_gib=24)
    plan = make_plan(options)
    cache = plan.budgets[0]
    assert not cache.fits
    assert plan.remedy(cache) == "would fit with generator.kv_cache_gib=1"


# ---- a run's own figures ----

ROW = {
    "throughput/sampled_tokens_per_s": 600.0,
    "utilization/generators": 0.75,
    "throughput/trained_tokens_per_s": 300.0,
    "throughput/trained_tokens": 384.0,
    "utilization/learner": 0.5,
    "rollout/response_tokens/mean": 64.0,
    "timing/step_s": 1.5,
    "timing/weight_sync/pause_s": 0.01,
    "timing/weight_sync/transfer_s": 0.02,
    "timing/weight_sync/resume_s": 0.03,
    "memory/learner_bytes": 900e6,
    "memory/generator-0_bytes": 2000e6,
    "memory/generator-1_bytes": 1000e6,
    "memory/object_store_spilled_bytes": 5e9,
}


def write_run(folder: Path, config: Config, rows: Sequence[dict[str, float]]) -> Path:
    folder.mkdir()
    dump_config(config, folder / "config.yaml")
    lines = [json.dumps({"step": step, **row}) for step, row in enumerate(rows, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_rates_are_tokens_over_seconds_of_work(tmp_path: Path, tiny_config: Config) -> None:
    config = changed(tiny_config, generator={"num_generators": 2})  # 12 rollouts a step
    slow = {**ROW, "timing/step_s": 99.0, "throughput/sampled_tokens_per_s": 1.0, "memory/learner_bytes": 950e6}
    idle = {**ROW, "throughput/sampled_tokens_per_s": 0.0, "utilization/generators": 0.0}
    found = measure(write_run(tmp_path / "run", config, [slow, slow, ROW, ROW, ROW, idle]))
    assert found.rates.sampled_tokens_per_s == 600 / (0.75 * 2)
    assert found.rates.trained_tokens_per_s == 300 / 0.5
    assert found.rates.trained_frac == 384 / (12 * 64)
    assert found.rates.sync_s == pytest.approx(0.06)
    assert (found.response_tokens, found.step_s, found.num_steps) == (64, 1.5, 3)
    assert found.memory_bytes == {"learner": 950e6, "generator-0": 2000e6, "generator-1": 1000e6}


def test_a_run_without_rates_is_refused(tmp_path: Path, tiny_config: Config) -> None:
    idle = {**ROW, "utilization/learner": 0.0}
    with pytest.raises(ValueError, match="no step in which"):
        measure(write_run(tmp_path / "idle", tiny_config, [idle]))
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        measure(tmp_path / "none")


def test_rates_given_take_the_place_of_measured_ones(tmp_path: Path, tiny_config: Config) -> None:
    folder = str(write_run(tmp_path / "run", tiny_config, [ROW]))
    plan = make_plan(PlanOptions(QWEN, from_run=folder, sampled_tokens_per_s=5000, response_tokens=100))
    assert plan.rates == Rates(5000, 600, pytest.approx(0.06), 0.5)
    assert plan.response_tokens == 100
    assert make_plan(PlanOptions(QWEN, from_run=folder)).response_tokens == 64


def test_one_rate_is_not_enough() -> None:
    with pytest.raises(RunError, match=r"^--sampled-tokens-per-s: "):
        make_plan(PlanOptions(QWEN, trained_tokens_per_s=1))
    assert run(QWEN, "--sampled-tokens-per-s", "1") == 2


def test_a_plan_says_when_rates_are_of_something_else(
    tmp_path: Path, tiny_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_run(tmp_path / "run", tiny_config, [ROW]))
    run(QWEN, "--from", folder)
    printed = capsys.readouterr().out
    assert "of another model (788,608 parameters)" in printed
    assert "of other devices" in printed


@pytest.mark.usefixtures("model_cache", "any_reward")
def test_a_run_that_was_trained_is_compared_process_by_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(make_run_config("algorithm.num_steps=4"), tmp_path / "run")
    assert run("configs/quickstart.yaml", "--from", str(tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    for process in ("driver", "Learner", "Generator", "Scorer", "TrajectoryBuffer", "WeightSync", "in all"):
        assert re.search(rf"^  {process} +[\d.]+ [KMG]iB; a plan of it expects", printed, re.MULTILINE), process


# ---- time ----


def test_a_step_is_the_sum_when_synchronous_and_the_slower_side_when_not() -> None:
    rates = Rates(sampled_tokens_per_s=1000, trained_tokens_per_s=4000, sync_s=0.5, trained_frac=0.5)
    config = plan_config(algorithm={"prompts_per_step": 10, "samples_per_prompt": 4, "epochs_per_batch": 2})
    overlapping = step_time(config, rates, response_tokens=100)
    assert (overlapping.sample_s, overlapping.train_s) == (
        4.0,
        1.0,
    )  # 4,000 sampled; 4,000 trained in two epochs
    assert overlapping.step_s == 4.5
    assert step_time(config, rates, 100, num_generators=8).step_s == 1.0
    assert step_time(changed(config, weight_sync={"max_lag": 0}), rates, 100).step_s == 5.5


def test_replayed_groups_are_trained_and_not_sampled() -> None:
    config = plan_config(buffer={"replay": {"frac": 0.25}})
    time = step_time(config, Rates(1000, 1000), response_tokens=100)
    assert (time.sample_s, time.train_s) == (24 * 8 * 100 / 1000, 32 * 8 * 100 / 1000)


def test_the_best_split_is_the_smallest_that_keeps_the_learner_busy() -> None:
    config = plan_config(generator={"num_gpus": 2})
    found = splits(config, Rates(1000, 2500), response_tokens=100, num_gpus=8)
    assert [(split.num_generators, split.num_gpus) for split in found] == [(1, 3), (2, 5), (3, 7)]
    assert best(found).num_generators == 3  # 25.6, 12.8 and 8.5 s to sample, 10.24 to train
    assert best(splits(config, Rates(1000, 100), 100, 8)).num_generators == 1
    synchronous = changed(config, weight_sync={"max_lag": 0})
    assert best(splits(synchronous, Rates(1000, 100), 100, 8)).num_generators == 3  # 264.5 s, with 2 268.8
    assert best(splits(synchronous, Rates(1000, 40), 100, 8)).num_generators == 2  # 652.8 s, with 3 648.5
    assert not splits(config, Rates(1000, 2500), 100, num_gpus=2)


def test_the_split_is_printed_with_who_waits(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ("--sampled-tokens-per-s", "3000", "--trained-tokens-per-s", "9000", "--response-tokens", "300")
    assert run(QWEN, "--gpus", "8", *rates) == 0
    printed = capsys.readouterr().out
    assert "best: generator.num_generators=3; 4 more GPUs bring nothing" in printed
    assert "Learner, 67%" in printed
    assert "Generators, 57%" in printed


def test_step_times_of_a_run_are_named_when_none_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(QWEN) == 0
    assert "time of a step: not known" in capsys.readouterr().out
    assert StepTime(1, 2, 0, True).step_s == 2


# ---- against whole runs ----

# The most of `memory/*_bytes` of `grpo-ray train configs/quickstart.yaml`, 40 steps on 2 cores, model built and
# warmed up in the run: what `make quickstart` does.
QUICKSTART = {
    "driver": 810.1e6, "learner": 1107e6, "generator-0": 2285e6, "scorer": 341.8e6, "buffer": 172.1e6,
}  # fmt: skip


@pytest.mark.parametrize("prompt_tokens", [256, 14])
def test_the_quickstarts_processes_are_within_an_eighth_of_what_was_measured(prompt_tokens: int) -> None:
    config = load_config("configs/quickstart.yaml")
    run = MeasuredRun(config, Rates(1, 1), 1, 1, 1, QUICKSTART)
    pairs = compare_memory(find_shape(config), run, prompt_tokens)
    assert [name for name, _, _ in pairs] == ["driver", "Learner", "Generator", "Scorer", "TrajectoryBuffer"]
    for _, expected, found in pairs:
        assert expected == pytest.approx(found, rel=0.12)
    assert sum(e for _, e, _ in pairs) == pytest.approx(sum(QUICKSTART.values()), rel=0.1)


def test_a_plan_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys; from grpo_ray.tools.cli import main; assert main(sys.argv[1:]) == 0; "
        "print(sorted({'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", QWEN], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
