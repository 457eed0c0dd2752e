"""The entropy's weight: constant, or following a target, also over a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import changed, flat_weights, make_batch, written

from grpo_ray.actors.learner import Learner
from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.policy.entropy_bonus import EntropyBonus
from grpo_ray.types import TrainBatch

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
    for entropy in (0.4, 0.5, 0.3, 0.6, None, 0.9, 0.9, 0.9, 0.9, 0.2):
        weights.append(bonus.weight)
        bonus.observe(entropy)
    # The coefficient: 0.1, 0.14, 0.16, 0.16, 0.12, 0.12, 0.08, 0.04, 0, 0, 0.04.
    assert weights == pytest.approx([0, 0.14, 0.16, 0.16, 0, 0, 0, 0, 0, 0])
    assert bonus.weight == pytest.approx(0.04)
    other = EntropyBonus(config)
    other.restore(bonus.state())
    assert (other.weight, other.state()) == (bonus.weight, bonus.state())


def test_a_learner_follows_the_target_and_resumes(
    tiny_config: Config, tiny_model: Callable[..., Path], tmp_path: Path
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
