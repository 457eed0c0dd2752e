"""The reference policy: its movement, the KL measured against it, and its part of a checkpoint."""

from pathlib import Path

import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    TinyModel,
    changed,
    check_names,
    flat_weights,
    make_batch,
    make_completion,
    make_group,
    make_item,
    own_logprobs,
    perturb,
    plain_logprobs,
    relative_difference,
    train_step,
    written,
)
from safetensors.torch import load_file

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner
from grpo_ray.types import TrainBatch

SECTIONS = {"learner": {"learning_rate": 1e-3}}
FROZEN = {"reference": "initial"}
REFRESHED = {"reference": "initial", "refresh_every_num_steps": 2}
AVERAGE = {"reference": "ema", "ema_decay": 0.75}


def reference_weights(learner: Learner) -> torch.Tensor:
    assert learner._reference is not None
    return torch.cat([master.detach().flatten().clone() for master in learner._reference.masters.parameters])


def step(learner: Learner, seed: int) -> dict[str, float]:
    metrics = train_step(learner, seed)
    assert check_names(metrics) == []
    of_clocks = ("timing/", "memory/", "perf/")
    return {name: value for name, value in metrics.items() if not name.startswith(of_clocks)}


@pytest.mark.slow
@pytest.mark.parametrize("kl", [FROZEN, REFRESHED, AVERAGE])
def test_a_reference_has_the_served_dtype_and_is_the_first_policy_of_every_second_step_or_an_average(
    make_learner: MakeLearner, kl: dict
) -> None:
    learner = make_learner(algorithm={"kl": {**kl, "coefficient": 0.5}}, model={"dtype": "bfloat16"})
    reference, policies = learner._reference, [flat_weights(learner.model)]
    assert reference is not None
    for seed in range(5):
        step(learner, seed)
        policies.append(flat_weights(learner.model))
        assert torch.equal(flat_weights(reference.model), reference_weights(learner).bfloat16())
        if kl is not AVERAGE:
            latest = learner.version // 2 * 2 if kl is REFRESHED else 0
            assert torch.equal(flat_weights(reference.model), policies[latest])
    assert not torch.equal(policies[0], policies[1])
    assert {(p.dtype, p.grad) for p in reference.model.parameters()} == {(torch.bfloat16, None)}
    assert not reference.model.training
    kept = torch.float32 if kl is AVERAGE else torch.bfloat16  # an average moves by less than bfloat16 can
    assert {p.dtype for p in reference.masters.parameters} == {kept}


def test_average_follows_its_formula(make_learner: MakeLearner) -> None:
    learner = make_learner(algorithm={"kl": AVERAGE})
    expected = flat_weights(learner.model).double()
    for seed in range(3):
        step(learner, seed)
        expected = 0.75 * expected + 0.25 * flat_weights(learner.model).double()
        assert relative_difference(reference_weights(learner).double(), expected) < 1e-6
    assert relative_difference(flat_weights(learner.model).double(), expected) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "kl"),
    [("qwen2", True, FROZEN), ("llama", False, FROZEN), ("grpo_ray", True, AVERAGE), ("qwen2", False, AVERAGE)],
)
def test_distance_in_bfloat16_is_0_at_version_0_on_long_responses(
    tiny_config: Config, tiny_model: TinyModel, family: str, tied: bool, kl: dict
) -> None:
    """Rotary frequencies in bfloat16 would be 1.2 rad off at position 1,000."""
    model = {"dtype": "bfloat16", "implementation": "grpo_ray" if family == "grpo_ray" else "transformers"}
    changes = {"model": model, "algorithm": {"kl": kl}, "learner": {"micro_batch_tokens": 1250}}
    learner = Learner(str(tiny_model(tied, own=family != "qwen2")), changed(tiny_config, **changes), ENDS)
    tokens = torch.randint(20, 280, (2, 1000), generator=torch.Generator().manual_seed(0))
    completions = [make_completion(row.tolist()) for row in tokens]
    group = make_group(make_item(0, [1, 2]), completions, [1, 0], [1.0, -1.0])
    metrics = learner.train_step(TrainBatch((group,))).metrics
    assert metrics["loss/kl_ref"] == metrics["loss/kl_ref_k3"] == 0.0


# ---- the measured distance ----


def test_distance_by_a_loop(make_learner: MakeLearner) -> None:
    """The metrics are means over all tokens, also of groups without signal."""
    learner = make_learner(algorithm={"kl": FROZEN}, sampling={"temperature": 0.7})
    assert learner._reference is not None
    perturb(learner._reference.model, seed=1, scale=0.05)
    groups = make_batch(learner)
    k1, k3 = [], []
    for group in groups:
        prompt = group.rollout.item.prompt_token_ids
        for c in group.rollout.completions:
            with torch.no_grad():
                new = own_logprobs(learner, prompt, c.token_ids.tolist())
                old = plain_logprobs(learner._reference.model, prompt, c.token_ids.tolist(), 0.7, 2, ENDS)
            k1 += (new - old).tolist()
            k3 += ((old - new).exp() - 1 - (old - new)).tolist()
    metrics = learner.train_step(TrainBatch(tuple(groups))).metrics
    assert metrics["loss/kl_ref"] == pytest.approx(sum(k1) / len(k1), rel=1e-4)
    assert metrics["loss/kl_ref_k3"] == pytest.approx(sum(k3) / len(k3), rel=1e-4)
    assert metrics["loss/kl_ref_k3"] > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kl", "tied", "resume_after"), [(FROZEN, True, 3), (REFRESHED, False, 1), (AVERAGE, False, 3)]
)
def test_reference_is_the_same_after_a_resume_and_in_the_checkpoint_if_it_moved(
    make_learner: MakeLearner, tiny_model: TinyModel, tmp_path: Path, kl: dict, tied: bool, resume_after: int,
) -> None:  # fmt: skip
    moves, kl = kl is not FROZEN, {**kl, "coefficient": 0.2}
    straight, first = (make_learner(tied, algorithm={"kl": kl}) for _ in range(2))
    for seed in range(resume_after):
        assert step(first, seed) == step(straight, seed)
    folder = written(first, tmp_path / "step")
    training = folder / "training"
    tensors = load_file(training / "optimizer.safetensors")
    kept = {name.removeprefix("reference/") for name in tensors if name.startswith("reference/")}
    assert kept == ({name for name, _ in first.model.named_parameters()} if moves else set())
    second = Learner(str(folder), first._config, ENDS, training, initial_path=str(tiny_model(tied)))
    assert torch.equal(reference_weights(second), reference_weights(straight))
    for seed in range(resume_after, 5):
        assert step(second, seed) == step(straight, seed)
    assert torch.equal(reference_weights(second), reference_weights(straight))
    assert torch.equal(flat_weights(second.model), flat_weights(straight.model))


def test_reference_missing_from_the_checkpoint_starts_at_the_policy(
    make_learner: MakeLearner, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """A run without a reference may resume with a moving average."""
    learner = make_learner(algorithm={"kl": {"reference": "none"}})
    assert learner._reference is None
    assert not any("kl_ref" in name for name in step(learner, 0))
    folder = written(learner, tmp_path / "step")
    tensors = load_file(folder / "training" / "optimizer.safetensors")
    assert not any(name.startswith("reference/") for name in tensors)
    config = changed(learner._config, algorithm={"kl": AVERAGE})
    second = Learner(str(folder), config, ENDS, folder / "training", initial_path=str(tiny_model()))
    assert torch.equal(reference_weights(second), flat_weights(learner.model))
