"""Where a Learner computes: float32 master weights beside a bfloat16 copy, off its device and back, cores."""

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from builders import MakeLearner, TinyModel, flat_weights, train_step
from torch import nn

from grpo_ray.core.learner import Learner
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.learning import device
from grpo_ray.learning.device import Offload, hold_to_cores
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.master_weights import MasterWeights

SECTIONS = {"model": {"dtype": "bfloat16"}}


def masters_of(learner: Learner) -> torch.Tensor:
    return torch.cat([master.detach().flatten().clone() for master in learner.masters.parameters])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("transformers", False), ("grpo_ray", True)])
def test_copy_is_bfloat16_and_masters_are_what_was_loaded(
    make_learner: MakeLearner, tiny_model: TinyModel, family: str, tied: bool
) -> None:
    learner = make_learner(tied, family)
    model: Any = learner.model
    loaded = load_policy(str(tiny_model(tied, own=family == "grpo_ray")), implementation=family)
    assert torch.equal(masters_of(learner), flat_weights(loaded))
    assert torch.equal(flat_weights(model), flat_weights(loaded).bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(buffer.dtype is torch.float32 for buffer in model.buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {master.data_ptr() for master in learner.masters.parameters}


@pytest.mark.parametrize("family", ["transformers", "grpo_ray"])
def test_learner_computes_as_the_sampler(make_learner: MakeLearner, tiny_model: TinyModel, family: str) -> None:
    """The residual stream included, so that equal inputs give equal logits."""
    learner = make_learner(family=family)
    engine = TorchEngine(learner._config, str(tiny_model(own=family == "grpo_ray")), 128, seed=0)
    ids = torch.randint(20, 280, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = (model(ids, use_cache=False).logits for model in (learner.model, engine._model))
    assert torch.equal(found, expected)


def test_gradients_of_a_master_are_the_sum_by_hand_and_frozen_weights_have_none() -> None:
    layer: Any = torch.nn.Linear(2, 1, bias=False)
    masters = MasterWeights(layer, torch.bfloat16)
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        layer(torch.tensor([[value, 0.0]], dtype=torch.bfloat16)).sum().backward()
    assert masters.named["weight"].grad.tolist() == [[258.0, 0.0]]
    assert layer.weight.grad is None
    layer = torch.nn.Linear(2, 1)
    layer.weight.requires_grad_(False)
    masters = MasterWeights(layer, torch.bfloat16)
    layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert masters.named["weight"].grad is None
    assert masters.named["bias"].grad.tolist() == [1.0]


def test_step_updates_the_masters_and_refreshes_the_copy(make_learner: MakeLearner) -> None:
    learner = make_learner(learner={"learning_rate": 1e-4})
    before = masters_of(learner)
    for seed in range(2):
        train_step(learner, seed)
        assert torch.equal(flat_weights(learner.model), masters_of(learner).bfloat16())
    assert not torch.equal(masters_of(learner), masters_of(learner).bfloat16().float())
    assert 0 < (masters_of(learner) - before).abs().max() < 3e-4


# ---- a colocated Learner off its device and back, and a process that is pinned to cores ----


CPU = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The host memory that is allocated from now on."""
    made: list[torch.Tensor] = []

    def remember(like: torch.Tensor) -> torch.Tensor:
        made.append(torch.empty_like(like))
        return made[-1]

    monkeypatch.setattr(device, "host_memory", remember)
    return made


def test_host_memory_is_allocated_once_and_holds_the_latest_values_or_constants(copies: list[Any]) -> None:
    moves, weight = Offload(), nn.Parameter(torch.tensor([1.0, 2.0]))
    for value in (3.0, 4.0, 5.0):
        weight.data = torch.full((2,), value)  # where it was on the device
        moves.move([weight], CPU)
        assert weight.data_ptr() == copies[0].data_ptr()
        assert copies[0].tolist() == [value, value]
    assert len(copies) == 1
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    moves.move([frozen], CPU, are_constant=True)
    frozen.data = torch.zeros(2)  # it never changes in use; this shows that nothing is copied again
    moves.move([frozen], CPU, are_constant=True)
    assert frozen.tolist() == [1.0, 1.0]
    assert len(copies) == 2


class Subclass(nn.Parameter):
    """Stands for 4-bit parameters, which move with their tables."""


def test_memory_of_a_tensor_that_is_gone_is_freed_and_never_another_tensors(copies: list[torch.Tensor]) -> None:
    moves = Offload()
    for value in range(5):
        moves.move([torch.full((2,), float(value))], CPU)
    assert [copy.tolist() for copy in copies] == [[float(value)] * 2 for value in range(5)]
    assert len(moves._memory) == 0
    moves.move([Subclass(torch.ones(2))], CPU)
    assert len(copies) == 5  # it was left alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_frozen_parts_tied_weights_and_masters(dtype: torch.dtype, copies: list[Any]) -> None:
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 2), nn.Linear(2, 4, bias=False), nn.BatchNorm1d(4))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    masters, moves = MasterWeights(model, dtype, trained), Offload()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    masters.to(CPU, moves)
    num_tensors = len({id(t) for t in model.state_dict(keep_vars=True).values() if isinstance(t, nn.Parameter)})
    num_masters = 0 if dtype == torch.float32 else len(trained)
    assert len(copies) == num_tensors + num_masters
    assert model[2].weight is model[0].weight
    for master in masters.parameters:
        master.data.add_(1.0)
    masters.refresh()
    masters.to(CPU, moves)
    assert len(copies) == num_tensors + num_masters
    after = model.state_dict()
    rounding = 0.0 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(after["0.weight"], before["0.weight"] + 1, atol=rounding, rtol=rounding)
    assert torch.equal(after["1.weight"], before["1.weight"])
    assert torch.equal(after["3.running_mean"], before["3.running_mean"])


def affinities(pipe: Connection, core: int) -> None:
    """Hold a process of several threads to a core and start another; send where each of them may run."""
    end, before = threading.Event(), os.sched_getaffinity(0)

    def start() -> None:
        ready = threading.Event()
        threading.Thread(target=lambda: (ready.set(), end.wait()), daemon=True).start()
        ready.wait()

    for _ in range(4):
        start()
    hold_to_cores(None)
    at_first = [os.sched_getaffinity(int(task)) == before for task in os.listdir("/proc/self/task")]
    hold_to_cores([core])
    start()
    pipe.send((at_first, [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]))
    end.set()


@pytest.mark.slow
def test_running_and_later_threads_are_held_to_the_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("this process may use one core only")
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=affinities, args=(there, cores[-1]), daemon=True)
    process.start()
    at_first, held = here.recv()
    process.join()
    assert all(at_first)
    assert len(held) == len(at_first) + 1 > 5
    assert all(cores_of_one == {cores[-1]} for cores_of_one in held)


def test_thread_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda _: ["999999999", *own])  # no thread has such a number
    hold_to_cores(sorted(os.sched_getaffinity(0)))
