"""The entropy's weight: constant, or following a target, also over a checkpoint."""

from pathlib import Path

import pytest
import torch
from builders import TinyModel, changed, flat_weights, make_batch, written

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.core.learner import Learner
from grpo_ray.learning.log_probs import ResponseLogProbs
from grpo_ray.learning.microbatch import collate_padded
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives.objective import EntropyBonus
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
