"""The optimizer: fused updates, moments in fewer bytes, and their way through moves and checkpoints."""

import errno
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    TinyModel,
    changed,
    file_size_limit,
    relative_difference,
    train_step,
    written,
)

from grpo_ray.config import Config, LearnerConfig
from grpo_ray.core.learner import Learner
from grpo_ray.errors import RunError
from grpo_ray.learning.device import Offload
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.master_weights import MasterWeights
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.optimizer import learning_rate, make_optimizer, move_optimizer
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.training_state import capture_state, write_state
from grpo_ray.run.training import check_same_moments

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
SECTIONS = {"learner": {"learning_rate": 1e-3}, "model": {"dtype": "bfloat16"}}


def trained(moments: str, num_steps: int, is_fused: bool = True) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Train a layer on a noisy regression; return its weights and the optimizer."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(64, 128))
    truth = torch.randn(64, 128, generator=generator)
    config = LearnerConfig(moments=moments, learning_rate=1e-2, weight_decay=0.1, num_gpus=0)
    optimizer = make_optimizer([weight], config)
    if not is_fused:
        optimizer = torch.optim.AdamW(
            [weight], lr=1e-2, betas=config.betas, eps=config.adam_eps, weight_decay=0.1, foreach=False
        )
    for _ in range(num_steps):
        inputs = torch.randn(16, 128, generator=generator)
        weight.grad = ((inputs @ (weight.detach() - truth).T).T @ inputs) / 16
        weight.grad += 0.1 * torch.randn(64, 128, generator=generator)
        optimizer.step()
    return weight.detach(), optimizer


def test_fused_updates_are_adamw() -> None:
    fused, plain = trained("float32", 50)[0], trained("float32", 50, is_fused=False)[0]
    assert relative_difference(fused, plain) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moments", "bound", "num_bytes"),
    [("bfloat16", 0.01, 2), pytest.param("8bit", 0.05, 1, marks=needs_bitsandbytes)],
)
def test_narrow_moments_stay_near_float32_over_300_steps(moments: str, bound: float, num_bytes: int) -> None:
    exact, (narrow, optimizer) = trained("float32", 300)[0], trained(moments, 300)
    assert 1e-5 < relative_difference(narrow, exact) < bound
    (state,) = optimizer.state.values()
    large = [t for t in state.values() if isinstance(t, torch.Tensor) and t.numel() == exact.numel()]
    assert [t.element_size() for t in large] == [num_bytes] * 2


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_all_of_the_state_moves(moments: str) -> None:
    """A counter that stays on another device than its weight ends the first fused step after a resume."""
    optimizer = trained(moments, 1)[1]
    before = {name: tensor.data_ptr() for name, tensor in optimizer.state[next(iter(optimizer.state))].items()}
    move_optimizer(optimizer, torch.device("cpu"), Offload())
    (state,) = optimizer.state.values()
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert all(tensor.data_ptr() != before[name] for name, tensor in state.items())


def train(learner: Learner, seed: int) -> torch.Tensor:
    train_step(learner, seed)
    return torch.cat([master.detach().flatten().clone() for master in learner.masters.parameters])


@pytest.mark.slow
@pytest.mark.parametrize("moments", ["bfloat16", pytest.param("8bit", marks=needs_bitsandbytes)])
def test_training_resumes_bit_for_bit(make_learner: MakeLearner, tmp_path: Path, moments: str) -> None:
    learner = make_learner(learner={"moments": moments})
    for seed in range(2):
        train(learner, seed)
    resumed = make_learner(checkpoint=written(learner, tmp_path / "step"), learner={"moments": moments})
    states = [each._optimizer.state[each.masters.parameters[0]] for each in (learner, resumed)]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert type(states[1][name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert states[1][name].dtype is value.dtype, name
    for seed in (2, 3):
        assert torch.equal(train(resumed, seed), train(learner, seed))


@needs_bitsandbytes
@pytest.mark.parametrize(("first", "second"), [("8bit", "bfloat16"), ("float32", "8bit")])
def test_moments_of_another_kind_are_refused_but_for_narrower_floats(
    make_learner: MakeLearner, tmp_path: Path, first: str, second: str
) -> None:
    learner = make_learner(learner={"moments": first})
    train(learner, 0)
    folder = written(learner, tmp_path / "step")
    checkpoint: Any = SimpleNamespace(training_path=folder / "training")
    now: Any = [SimpleNamespace(learner=LearnerConfig.model_validate({"moments": m})) for m in (first, second)]
    check_same_moments(now[0], checkpoint)
    with pytest.raises(RunError, match=r"learner\.moments: the checkpoint's moments"):
        check_same_moments(now[1], checkpoint)
    if first == "float32":
        resumed = make_learner(checkpoint=folder, learner={"moments": "bfloat16"})
        assert resumed._optimizer.state[resumed.masters.parameters[0]]["exp_avg"].dtype is torch.bfloat16
        assert torch.isfinite(train(resumed, 1)).all()


def test_moments_of_8_bits_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"learner\.moments: 8bit needs the package bitsandbytes"):
        make_optimizer([torch.nn.Parameter(torch.zeros(1))], LearnerConfig(moments="8bit"))
    make_optimizer([torch.nn.Parameter(torch.zeros(1))], LearnerConfig())


# ---- the learning rate ----


def rates(num_steps: int, **fields: Any) -> list[float]:
    config = LearnerConfig(**{"learning_rate": 0.8, **fields})
    return [learning_rate(config, step, num_steps) for step in range(1, num_steps + 1)]


def test_learning_rates_by_hand() -> None:
    assert rates(4) == [0.8] * 4
    assert rates(5, warmup_steps=2) == [0.4, 0.8, 0.8, 0.8, 0.8]
    assert rates(4, lr_schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(6, lr_schedule="linear", warmup_steps=2) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2])
    assert rates(4, lr_schedule="linear", min_lr_ratio=0.5) == pytest.approx([0.8, 0.7, 0.6, 0.5])
    half = 0.4 * (1 + 0.5**0.5), 0.4 * (1 - 0.5**0.5)  # cosines of 45 and 135 degrees
    assert rates(4, lr_schedule="cosine") == pytest.approx([0.8, half[0], 0.4, half[1]])
    assert rates(2, warmup_steps=9) == pytest.approx([0.8 / 9, 1.6 / 9])


@pytest.mark.slow
def test_learners_decay_over_the_runs_steps(tiny_config: Config, tiny_model: TinyModel, tmp_path: Path) -> None:
    options = {"learning_rate": 0.8, "lr_schedule": "linear", "warmup_steps": 1, "num_gpus": 0}
    sizes = {"num_steps": 4, "train_batch_size": 4}  # three updates per step, all at the step's rate
    config = changed(tiny_config, learner=options, algorithm=sizes)

    def step(learner: Learner) -> float:
        return train_step(learner)["optim/lr"]

    learner = Learner(str(tiny_model()), config, ENDS)
    assert [step(learner), step(learner)] == pytest.approx([0.8, 0.8])
    folder = written(learner, tmp_path / "step")
    again = Learner(str(folder), config, ENDS, folder / "training")
    assert [step(again), step(again)] == pytest.approx([0.8 * 2 / 3, 0.8 / 3])
    longer = Learner(str(folder), changed(config, algorithm={"num_steps": 5}), ENDS, folder / "training")
    assert [step(longer) for _ in range(3)] == pytest.approx([0.6, 0.4, 0.2])  # the decay of five steps


@pytest.mark.parametrize("is_model_written", [False, True], ids=["model", "tokenizer"])
def test_a_disk_that_fills_up_is_an_os_error_whoever_finds_it(
    is_model_written: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, tokenizer = load_policy(str(tiny_model())), load_tokenizer(str(tiny_model()))
    masters, optimizer = MasterWeights(model, torch.float32), torch.optim.AdamW(model.parameters())
    state = capture_state(masters, optimizer, {"version": 1}, {})
    (tmp_path / "training").mkdir()
    if is_model_written:  # the disk fills up after the model's files, in tokenizer.json, which Rust writes
        (tmp_path / "config.json").write_text("{}")
        monkeypatch.setattr(model, "save_pretrained", lambda *_, **__: None)
    with file_size_limit(2000), pytest.raises(OSError, match="too large") as caught:
        write_state(state, model, tokenizer, torch.float32, tmp_path, Ranks())
    assert caught.value.errno == errno.EFBIG


def test_a_capture_takes_over_the_memory_of_one_that_is_written_and_touches_no_gpu(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking CUDA for its random state makes a context of some hundred MiB on the first GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("CUDA was asked"))
    model = load_policy(str(tiny_model(tied=True)))
    masters, optimizer = MasterWeights(model, torch.bfloat16), torch.optim.AdamW(model.parameters())
    first = capture_state(masters, optimizer, {"version": 1}, {})
    places = {name: tensor.data_ptr() for name, tensor in first.weights.items()}
    with torch.no_grad():
        for master in masters.parameters:
            master.add_(1)
    second = capture_state(masters, optimizer, {"version": 2}, {}, spare=first)
    assert {name: tensor.data_ptr() for name, tensor in second.weights.items()} == places
    assert all(torch.equal(second.weights[name], master) for name, master in masters.named.items())
    assert second.weights["lm_head.weight"] is second.weights["model.embed_tokens.weight"]
