"""Responses without advantage are not computed; the updates are those of the whole batch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import ENDS, changed, flat_weights, gradient, make_batch, relative_difference

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner
from grpo_ray.learning.sequences import TrainSequence, sequences_of
from grpo_ray.types import ScoredGroup, TrainBatch

# Of the twelve responses in the four groups of `make_batch`, those with an advantage:
OF_GROUPS = {(0, 0), (0, 1), (0, 2), (2, 0), (2, 1), (2, 2)}  # equal rewards: groups 1 and 3
OF_RIGHT = {(0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)}  # raw rewards: wrong responses, in any group
LOSSES = {
    "reinforce_with_baseline": OF_GROUPS, "unclipped": OF_GROUPS, "grpo_clip": OF_GROUPS, "gspo": OF_GROUPS,
    "no_baseline": OF_RIGHT,
}  # fmt: skip


@pytest.fixture
def make_learner(tiny_config: Config, tiny_model: Callable[..., Path]) -> Callable[..., Learner]:
    def make(**changes: dict[str, Any]) -> Learner:
        config = changed(tiny_config, algorithm={"prompts_per_step": 4, "samples_per_prompt": 3})
        return Learner(str(tiny_model()), changed(config, **changes), ENDS)

    return make


def computing_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every response count as one with signal, so that none is pruned."""
    monkeypatch.setattr(TrainSequence, "has_signal", True)


def train(learner: Learner, batches: Sequence[Sequence[ScoredGroup]]) -> list[float]:
    """Train one step per batch; return each step's number of trained tokens."""
    reports = [learner.train_step(TrainBatch(tuple(groups))) for groups in batches]
    return [report.metrics["throughput/trained_tokens"] for report in reports]


def num_tokens(groups: Sequence[ScoredGroup], which: set[tuple[int, int]] | None = None) -> int:
    return sum(
        len(completion.token_ids)
        for place, group in enumerate(groups)
        for number, completion in enumerate(group.rollout.completions)
        if which is None or (place, number) in which
    )


@pytest.mark.slow
@pytest.mark.parametrize("updates", [{}, {"train_batch_size": 6, "epochs_per_batch": 2}], ids=["one", "four"])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_those_of_training_on_every_response(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch, loss: str, updates: dict[str, int]
) -> None:
    """One response per micro-batch keeps rounding out of Adam, which would blow it up where a gradient is 0."""
    # With seed 0 the first of the four minibatches would have no signal at all: see the last but one test.
    run = {"seed": 1}
    options = {"algorithm": {"loss": loss, **updates}, "learner": {"micro_batch_tokens": 1}, "run": run}
    pruned, whole = make_learner(**options), make_learner(**options)
    batches = [make_batch(pruned, seed) for seed in range(2)]
    before = flat_weights(pruned.model)
    passes = updates.get("epochs_per_batch", 1)
    assert train(pruned, batches) == [passes * num_tokens(groups, LOSSES[loss]) for groups in batches]
    computing_everything(monkeypatch)
    assert train(whole, batches) == [passes * num_tokens(groups) for groups in batches]
    assert not torch.allclose(flat_weights(pruned.model), before)
    assert (flat_weights(pruned.model) - flat_weights(whole.model)).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "constant", "prompt_mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_denominator_stays_the_whole_batchs(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch, loss: str, aggregation: str
) -> None:
    """With several responses per micro-batch the order of the sums differs, and with it the rounding."""
    learner = make_learner(algorithm={"loss": loss, "aggregation": aggregation})
    sequences = sequences_of(make_batch(learner))
    pruned_loss = learner.accumulate_gradient(sequences)["loss"]
    pruned = gradient(learner)
    computing_everything(monkeypatch)
    assert learner.accumulate_gradient(sequences)["loss"] == pytest.approx(pruned_loss, abs=1e-6)
    assert relative_difference(pruned, gradient(learner)) < 1e-6
    monkeypatch.undo()
    kept = [sequence for sequence in sequences if sequence.has_signal]
    learner.accumulate_gradient(kept)  # for comparison, a denominator of the kept responses alone
    assert relative_difference(gradient(learner), pruned) > 0.1


def test_an_update_without_any_signal_is_none_at_all(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of zero would still be a step of Adam, which moves the weights by its momentum."""
    pruned, whole = make_learner(), make_learner()
    groups = make_batch(pruned)
    for learner in (pruned, whole):
        train(learner, [groups])
    before = flat_weights(pruned.model)
    assert train(pruned, [[groups[1], groups[3]]]) == [0.0]
    assert torch.equal(flat_weights(pruned.model), before)
    computing_everything(monkeypatch)
    assert train(whole, [[groups[1], groups[3]]]) == [num_tokens([groups[1], groups[3]])]
    assert (flat_weights(whole.model) - before).abs().max() > 1e-6


def test_a_penalty_on_a_token_is_a_signal() -> None:
    """KL-Cov holds tokens back that need not have an advantage of their own."""
    zeros = np.zeros(2, np.float32)
    sequence = TrainSequence((1,), np.array([5, 6]), zeros, 0.0, token_penalties=zeros)
    assert not sequence.has_signal
    held = TrainSequence((1,), np.array([5, 6]), zeros, 0.0, token_penalties=np.array([0, 1], np.float32))
    assert held.has_signal
