"""The whole objective: what it needs and what it refuses, and a coefficient that follows the entropy."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from builders import TinyModel, changed, flat_weights, make_batch, written

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.losses import LOSS_RECORDS
from grpo_ray.core.learner import Learner
from grpo_ray.learning.log_probs import ResponseLogProbs
from grpo_ray.learning.microbatch import collate_padded
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives import RATIO_LOSSES, LossType, Objective, policy_gradient_step
from grpo_ray.objectives.objective import EntropyBonus
from grpo_ray.types import TrainBatch

LOSS_TYPES = get_args(LossType)
NAN = float("nan")


def ranges(loss_type: LossType) -> tuple[float, ...]:
    """Return a clip range of 0.8 to 1.3 for the losses that have one."""
    return () if LOSS_RECORDS[loss_type].epsilons is None else (0.2, 0.3)


def example(batch: int = 6, seq: int = 5, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(batch, seq, generator=generator, dtype=torch.float64)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "policy_log_probs": old + 0.4 * noise(batch, seq),
        "response_mask": torch.arange(seq) < torch.tensor([[5], [2], [1], [4], [3], [5]]),
        "advantages": noise(batch, 1),
        "old_log_probs": old,
        "weights": 0.3 + torch.rand(batch, seq, generator=generator, dtype=torch.float64),
        "reference_log_probs": old + 0.3 * noise(batch, seq),
        "entropy": noise(batch, seq).square(),
    }


PER_TOKEN = [name for name in example() if name not in ("advantages", "response_mask")]


def full(loss_type: LossType) -> Objective:
    """Return an objective with every term."""
    dual_clip = 1.3 if loss_type == "grpo_clip" else None
    terms = {"dual_clip": dual_clip, "kl_coefficient": 0.5, "entropy_bonus": 0.1}
    return Objective(loss_type, "sequence_mean", *ranges(loss_type), **terms)


def test_a_reference_only_measured_changes_no_gradient():
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in example().items()}
    policy, objective = tensors["policy_log_probs"].requires_grad_(), Objective("grpo_clip", "token_mean")
    measured = {name: tensors.pop(name) for name in ("reference_log_probs", "entropy")}
    expected, without = policy_gradient_step(**tensors, objective=objective)
    loss, sums = policy_gradient_step(**tensors, **measured, objective=objective)
    assert loss == expected
    assert torch.equal(*(torch.autograd.grad(each, policy)[0] for each in (loss, expected)))
    assert set(sums) - set(without) == {"kl_k1_sum", "kl_k3_sum"}
    assert sums["kl_k1_sum"].dtype == sums["kl_k3_sum"].dtype == torch.float64


def test_nan_at_a_live_token_is_not_hidden():
    for name in ("policy_log_probs", "weights", "reference_log_probs", "entropy", "advantages"):
        tensors = example()
        tensors[name][0, 0] = NAN
        loss, _ = policy_gradient_step(**tensors, objective=full("gspo"), denominator=6.0)
        assert loss.isnan(), name


def test_which_losses_need_old_log_probs():
    needing = {name for name in LOSS_TYPES if Objective(name, "constant").needs_old_log_probs}
    assert needing == set(RATIO_LOSSES)
    plain = Objective("reinforce_with_baseline", "constant", kl_estimator="unbiased")
    assert not plain.needs_old_log_probs  # without a coefficient
    assert replace(plain, kl_coefficient=0.1).needs_old_log_probs


@pytest.mark.parametrize(
    ("loss_type", "missing"),
    [
        ("gspo", "old_log_probs"),
        ("gspo", "reference_log_probs"),
        ("gspo", "entropy"),
        ("gspo", "advantages"),
        ("unclipped", "old_log_probs"),
        ("no_baseline", "raw_rewards"),
    ],
)
def test_a_missing_argument_is_named(loss_type, missing):
    tensors = example()
    tensors["advantages" if missing == "raw_rewards" else missing] = None
    with pytest.raises(ValueError, match=f"needs {missing}"):
        policy_gradient_step(**tensors, objective=full(loss_type), denominator=6.0)


@pytest.mark.parametrize("name", [*PER_TOKEN[1:], "response_mask"])
def test_an_argument_of_another_shape_is_named(name):
    tensors = example()
    tensors[name] = tensors[name][:1]
    with pytest.raises(ValueError, match=f"{name} has shape"):
        policy_gradient_step(**tensors, objective=full("cispo"), denominator=6.0)


ENDS = (0, 17)


def test_a_constant_weight_stays() -> None:
    bonus = EntropyBonus(AlgorithmConfig(entropy_bonus=0.1))
    bonus.observe(0.0)
    assert bonus.weight == 0.1
    assert bonus.state() == {}
    bonus.restore({"entropy_coefficient": 0.5, "entropy_is_low": 1.0})
    assert bonus.weight == 0.1


def test_an_adapted_weight_by_hand() -> None:
    config = AlgorithmConfig(entropy_bonus=0.1, entropy_target=0.5, entropy_step=0.04, entropy_bonus_max=0.16)
    bonus, weights = EntropyBonus(config), []
    for entropy in (0.4, 0.5, 0.3, 0.6, None, 0.9, 0.9, 0.9, float("nan"), 0.9, 0.2):
        weights.append(bonus.weight)
        bonus.observe(entropy)
    # The coefficient: 0.1, 0.14, 0.16, 0.16, 0.12, 0.12, 0.08, 0.04, 0, 0, 0.04.
    assert weights == pytest.approx([0, 0.14, 0.16, 0.16, 0, 0, 0, 0, 0, 0, 0])
    assert bonus.weight == pytest.approx(0.04)
    other = EntropyBonus(config)
    other.restore(bonus.state())
    assert (other.weight, other.state()) == (bonus.weight, bonus.state())


@pytest.mark.slow
def test_a_learner_follows_the_target_and_resumes(
    tiny_config: Config, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The entropy is below 6 and above 5.5 nats: log(300) = 5.7."""
    weights = {}
    for target in (5.0, 6.0):
        options = {"entropy_target": target, "entropy_bonus": 0.3, "entropy_step": 0.1}
        config = changed(tiny_config, algorithm=options, learner={"learning_rate": 1e-3})
        straight = Learner(str(tiny_model()), config, ENDS)
        weights[target] = []
        for seed in range(4):
            if seed == 2:
                folder = written(straight, tmp_path / f"step-{target}")
                resumed = Learner(str(folder), config, ENDS, folder / "training")
            batch = TrainBatch(tuple(make_batch(straight, seed, versions=seed)))
            weights[target].append(straight.train_step(batch).metrics["loss/entropy_bonus"])
            if seed >= 2:
                assert resumed.train_step(batch).metrics["loss/entropy_bonus"] == weights[target][-1]
        assert torch.equal(flat_weights(straight.model), flat_weights(resumed.model))
    assert weights == {5.0: [0.0] * 4, 6.0: pytest.approx([0.0, 0.4, 0.5, 0.6])}


def test_with_a_target_the_entropy_is_that_of_all_tokens_that_the_bonus_acts_on(
    tiny_config: Config, tiny_model: TinyModel
) -> None:
    """Two of the four groups have no advantage; without a target the metric leaves them out."""
    found = {}
    for target in (None, 5.0):
        config = changed(tiny_config, algorithm={"entropy_target": target})
        learner = Learner(str(tiny_model()), config, ENDS)
        groups = make_batch(learner)
        sequences = sequences_of(groups)
        with torch.no_grad():
            batch = collate_padded(sequences)
            _, entropies = ResponseLogProbs(config.sampling, ENDS)(learner.model, batch)
        mask = batch.advantage_mask if target is None else batch.response_mask
        found[target] = learner.train_step(TrainBatch(tuple(groups))).metrics
        assert found[target]["policy/entropy/exact"] == pytest.approx(entropies[mask].mean().item(), rel=1e-5)
    assert found[None]["throughput/trained_tokens"] == found[5.0]["throughput/trained_tokens"]
    assert found[None]["policy/entropy/exact"] != pytest.approx(found[5.0]["policy/entropy/exact"], rel=1e-5)
