"""Float32 master weights beside a bfloat16 copy: dtypes, gradients, updates, checkpoints."""

from typing import Any

import pytest
import torch
from builders import ENDS, MakeLearner, TinyModel, changed, flat_weights, train_step

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.master_weights import MasterWeights

FAMILIES = ("transformers", "grpo_ray")


@pytest.fixture
def make_learner(tiny_config: Config, tiny_model: TinyModel, copied_models: None) -> MakeLearner:
    """Return `make_learner(family="transformers", tied=True, learner={...}, ...)`, of a bfloat16 Learner."""

    def make(family: str = "transformers", tied: bool = True, **changes: dict[str, Any]) -> Learner:
        changes = {"model": {"dtype": "bfloat16", "implementation": family}, **changes}
        return Learner(str(tiny_model(tied, own=family == "grpo_ray")), changed(tiny_config, **changes), ENDS)

    return make


def masters_of(learner: Learner) -> torch.Tensor:
    return torch.cat([master.detach().flatten().clone() for master in learner.masters.parameters])


def test_float32_weights_are_their_own_masters(tiny_model: TinyModel) -> None:
    model = load_policy(str(tiny_model()))
    masters = MasterWeights(model, torch.float32)
    assert all(master is model.get_parameter(name) for name, master in masters.named.items())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("transformers", False), ("grpo_ray", True)])
def test_copy_is_bfloat16_and_masters_are_what_was_loaded(
    make_learner: MakeLearner, tiny_model: TinyModel, family: str, tied: bool
) -> None:
    learner = make_learner(family, tied)
    model: Any = learner.model
    loaded = load_policy(str(tiny_model(tied, own=family == "grpo_ray")), implementation=family)
    assert torch.equal(masters_of(learner), flat_weights(loaded))
    assert torch.equal(flat_weights(model), flat_weights(loaded).bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(buffer.dtype is torch.float32 for buffer in model.buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    own = {p.data_ptr() for p in model.parameters()}
    assert not own & {master.data_ptr() for master in learner.masters.parameters}


@pytest.mark.parametrize("family", FAMILIES)
def test_learner_computes_what_the_sampler_computes(
    make_learner: MakeLearner, tiny_model: TinyModel, family: str
) -> None:
    """The residual stream included, so that equal inputs give equal logits."""
    learner = make_learner(family)
    folder = str(tiny_model(True, own=family == "grpo_ray"))
    engine = TorchEngine(learner._config, folder, 128, seed=0)
    ids = torch.randint(20, 280, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(
            learner.model(ids, use_cache=False).logits, engine._model(ids, use_cache=False).logits
        )


def test_gradients_of_a_master_are_the_sum_by_hand() -> None:
    layer: Any = torch.nn.Linear(2, 1, bias=False)
    masters = MasterWeights(layer, torch.bfloat16)
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        layer(torch.tensor([[value, 0.0]], dtype=torch.bfloat16)).sum().backward()
    assert masters.named["weight"].grad.tolist() == [[258.0, 0.0]]
    assert layer.weight.grad is None


def test_frozen_weights_have_a_master_and_no_gradient() -> None:
    layer: Any = torch.nn.Linear(2, 1)
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
