"""The Learner's updates: several per batch, every loss, correction and added term, against plain loops."""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders import (
    MakeLearner,
    check_names,
    flat_weights,
    gradient,
    make_batch,
    make_completion,
    make_group,
    make_item,
    own_logprobs,
    perturb,
    relative_difference,
    resume,
    rows_of,
    written,
)
from episode_batches import Turn, distribution, slow_gradient

from grpo_ray.config.losses import PRESETS
from grpo_ray.core.learner import Learner
from grpo_ray.errors import RunError
from grpo_ray.learning.sequences import TrainSequence, sequences_of
from grpo_ray.objectives import group_advantages
from grpo_ray.types import ScoredGroup, TrainBatch

AGGREGATIONS = ("sequence_mean", "token_mean", "constant", "sequence_sum", "prompt_mean")
MAX_TOKENS = 16
# Of the 12 responses of `make_batch`, without gradient clipping.
SECTIONS: dict[str, Any] = {
    "algorithm": {"prompts_per_step": 4, "samples_per_prompt": 3},
    "learner": {"max_grad_norm": 1e6, "learning_rate": 3e-4},
}


def step(learner: Learner, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    metrics = learner.train_step(TrainBatch(tuple(groups))).metrics
    assert check_names(metrics) == []
    return metrics


# ---- the formulas, one response and one token at a time ----


def turns_of(sequences: Sequence[TrainSequence]) -> list[list[Turn]]:
    """Return the sequences as episodes of one turn, for the slow reference."""
    found = []
    for s in sequences:
        weights, penalties = (None if v is None else v.tolist() for v in (s.token_weights, s.token_penalties))
        reply, behaviour = s.response_token_ids.tolist(), s.behaviour_logprobs.tolist()
        turn = Turn(list(s.prompt_token_ids), reply, behaviour, float(s.advantage))
        found.append([replace(turn, weights=weights, penalties=penalties)])
    return found


@torch.no_grad()
def rows_before(learner: Learner, sequences: Sequence[TrainSequence]) -> list[list[torch.Tensor]]:
    """Compute the log-distributions of each sequence's tokens under the current policy."""
    pairs = [(s.prompt_token_ids, s.response_token_ids) for s in sequences]
    return rows_of(learner.model, pairs, *distribution(learner._config))


class Update:
    """One actual update, and the expected one from the formulas at the same weights."""

    def __init__(
        self, learner: Learner, first: Any, reference: Any, sequences: Sequence[TrainSequence], loss: float
    ) -> None:
        self.sequences = list(sequences)
        self.loss, self.gradient = loss, gradient(learner)
        self.expected_loss, self.expected, self.num_clipped = slow_gradient(
            learner.model, learner._config, turns_of(sequences), reference, first, [s.group for s in sequences]
        )


def updates_of(learner: Learner, groups: Sequence[ScoredGroup]) -> tuple[list[Update], dict[str, float]]:
    """Train a step; check each of its updates against the formulas."""
    original, updates = learner.accumulate_gradient, list[Update]()
    reference = learner._reference.model if learner._reference else None
    others = copy.deepcopy(learner.model), copy.deepcopy(reference)

    def accumulate(sequences: Sequence[TrainSequence]) -> dict[str, float]:
        sums = original(sequences)
        updates.append(Update(learner, *others, sequences, sums["loss"]))
        return sums

    learner.accumulate_gradient = accumulate  # type: ignore[method-assign]
    metrics = step(learner, groups)
    del learner.accumulate_gradient
    for update in updates:
        assert update.loss == pytest.approx(update.expected_loss, rel=1e-4, abs=1e-6)
        assert update.expected.norm() > 1e-3  # otherwise any gradient would pass
        assert relative_difference(update.gradient, update.expected) < 1e-5
    return updates, metrics


def all_with_signal(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Give every group advantages, so that every small minibatch has a gradient."""
    return [
        replace(group, advantages=np.array([0.9, -0.7, 0.4 - 0.3 * place], np.float32))
        for place, group in enumerate(groups)
    ]


def cut_off(groups: Sequence[ScoredGroup], which: set[tuple[int, int]]) -> list[ScoredGroup]:
    """Return the groups with completions (group, sample) cut off by `max_tokens`."""
    return [
        replace(group, rollout=replace(group.rollout, completions=tuple(
            replace(c, finish_reason="length") if (i, j) in which else c
            for j, c in enumerate(group.rollout.completions)
        )))
        for i, group in enumerate(groups)
    ]  # fmt: skip


# ---- several updates per batch ----


LEASH = """
from grpo_ray.objectives import RatioInputs
def leash(inputs: RatioInputs):
    return -inputs.log_ratio.exp() * inputs.advantages + inputs.log_ratio.square(), {}
"""


@pytest.mark.slow
def test_a_loss_with_a_term_of_its_own_is_computed_where_the_advantage_is_zero(
    make_learner: MakeLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups 1 and 3 have no advantages; `kl_tau` and an own pull to the old policy act on them too."""
    (tmp_path / "my_leash_4712.py").write_text(LEASH)
    monkeypatch.syspath_prepend(tmp_path)
    learner = make_learner(algorithm={"loss": "ipo", "loss_options": {"kl_tau": 0.5}})
    groups = make_batch(learner)
    whole = sum(s.num_sampled for s in sequences_of(groups))
    (_,), metrics = updates_of(learner, groups)
    assert metrics["throughput/trained_tokens"] == whole
    own = make_learner(algorithm={"loss": "my_leash_4712:leash"})
    assert step(own, [groups[1], groups[3]])["optim/grad_norm"] > 0
    assert step(make_learner(algorithm={"loss": "ipo"}), groups)["throughput/trained_tokens"] < whole


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo_clip", "gspo"])
def test_later_updates_compare_with_the_policy_before_the_first(make_learner: MakeLearner, loss: str) -> None:
    """In the ratio of a token, or of a response; test_algorithm_combinations.py has every loss."""
    options = {"loss": loss, "old_log_probs": "proximal", "epochs_per_batch": 2, "train_batch_size": 6}
    learner = make_learner(algorithm=options)
    updates, metrics = updates_of(learner, all_with_signal(make_batch(learner)))
    assert len(updates) == 4
    assert updates[0].num_clipped == 0  # its ratios are 1
    num_clipped = sum(update.num_clipped for update in updates)
    num_tokens = sum(s.num_sampled for update in updates for s in update.sequences)
    assert metrics["loss/clip_frac"] == pytest.approx(num_clipped / num_tokens)
    assert num_clipped > 0


@pytest.mark.slow
def test_old_log_probabilities_are_looked_up_once_and_only_for_several_updates(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ratios of `behaviour` use the sampler's logprobs.
    for old, epochs, expected in (("proximal", 1, []), ("proximal", 3, [12]), ("behaviour", 2, [])):
        learner = make_learner(algorithm={"old_log_probs": old, "epochs_per_batch": epochs})
        lookup = Mock(wraps=learner._forward_backward.with_proximal)
        monkeypatch.setattr(learner._forward_backward, "with_proximal", lookup)
        step(learner, make_batch(learner))
        assert [len(call.args[1]) for call in lookup.call_args_list] == expected


@pytest.mark.slow
def test_every_step_shuffles_anew(make_learner: MakeLearner) -> None:
    """In another order with another seed."""
    dealt = []
    for seed in (0, 1):
        options = {"learner": {"learning_rate": 0.0}, "run": {"seed": seed}}
        learner = make_learner(algorithm={"train_batch_size": 4}, **options)
        groups = all_with_signal(make_batch(learner))
        for _ in range(2):
            updates, _ = updates_of(learner, groups)
            tokens = [[s.response_token_ids.tobytes() for s in update.sequences] for update in updates]
            dealt.append(list(map(Counter, tokens)))
    assert dealt[0] != dealt[1]
    assert dealt[0] != dealt[2]


def test_no_capture_between_two_updates(make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner(algorithm={"epochs_per_batch": 1, "train_batch_size": 6})
    batch, accumulate, calls = make_batch(learner), learner.accumulate_gradient, iter((False, True))
    step(learner, batch)
    learner.capture()
    monkeypatch.setattr(learner, "accumulate_gradient", lambda s: 1 / 0 if next(calls) else accumulate(s))
    with pytest.raises(ZeroDivisionError):
        step(learner, batch)
    with pytest.raises(RunError, match="step 2 ended between its updates"):
        learner.capture()


def test_skipped_update_leaves_the_others_of_its_batch(make_learner: MakeLearner) -> None:
    options = {"epochs_per_batch": 1, "train_batch_size": 6, "loss": "reinforce_with_baseline"}
    learner = make_learner(algorithm=options)
    groups = all_with_signal(make_batch(learner))
    groups[0].advantages[0] = np.inf
    before = flat_weights(learner.model)
    metrics = step(learner, groups)
    assert (metrics["optim/num_updates"], metrics["optim/skipped_updates"]) == (2.0, 1.0)
    assert torch.isfinite(flat_weights(learner.model)).all()
    assert not torch.equal(flat_weights(learner.model), before)
    assert not math.isfinite(metrics["optim/grad_norm"])


@pytest.mark.parametrize(("epochs", "size"), [(2, None), (1, 3), (2, 6)])
def test_minibatches_without_signal_are_zero(make_learner: MakeLearner, epochs: int, size: int | None) -> None:
    """Gradients of zero would still be steps of Adam, which move the weights by its momentum."""
    learner = make_learner(algorithm={"epochs_per_batch": epochs, "train_batch_size": size})
    groups = make_batch(learner)
    step(learner, groups)
    before = flat_weights(learner.model)
    learner.version = 0  # of which the tokens are
    metrics = step(learner, [groups[1], groups[3], groups[1], groups[3]])
    assert metrics["optim/num_updates"] == epochs * 12 / (size or 12)
    assert metrics["loss/policy"] == metrics["optim/grad_norm"] == metrics["throughput/trained_tokens"] == 0.0
    assert torch.equal(flat_weights(learner.model), before)


def test_a_penalty_on_a_token_is_a_signal() -> None:
    """KL-Cov holds tokens back that need not have an advantage of their own."""
    zeros = np.zeros(2, np.float32)
    sequence = TrainSequence((1,), np.array([5, 6]), zeros, 0.0, token_penalties=zeros)
    assert not sequence.has_signal
    assert replace(sequence, token_penalties=np.array([0, 1], np.float32)).has_signal


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo_clip", "no_baseline"])
def test_only_responses_with_an_advantage_are_computed(make_learner: MakeLearner, loss: str) -> None:
    """With raw rewards that is every right response, whatever its group."""
    learner = make_learner(algorithm={"loss": loss})
    groups = make_batch(learner)
    which = {(0, 0), (1, 0), (1, 1), (1, 2), (2, 1), (2, 2)} if loss == "no_baseline" else {
        (place, number) for place in (0, 2) for number in range(3)
    }  # fmt: skip
    expected = sum(len(groups[place].rollout.completions[number].token_ids) for place, number in which)
    assert step(learner, groups)["throughput/trained_tokens"] == expected


# ---- tokens of another distribution ----


SELECTIONS: dict[str, dict[str, Any]] = {
    "top_entropy": {"share": 0.3},
    "clip_cov": {"share": 0.1, "low": 0.01, "high": 2.0},
    "kl_cov": {"share": 0.1, "coefficient": 0.7},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("selection", "epochs", "tokens"),
    [("top_entropy", 1, 1), ("top_entropy", 2, 100_000), ("clip_cov", 2, 1), ("kl_cov", 1, 100_000)],
)
def test_selected_tokens_are_those_of_the_whole_batch_before_the_first_update(
    make_learner: MakeLearner, selection: str, epochs: int, tokens: int
) -> None:
    options = {"token_selection": selection, "selection_options": SELECTIONS[selection]}
    options |= {"epochs_per_batch": epochs, "train_batch_size": 6 * epochs}
    learner = make_learner(algorithm=options, learner={"micro_batch_tokens": tokens})
    learner.version = 1  # the batch is of version 0: a policy's own tokens have no penalty
    groups = all_with_signal(make_batch(learner))
    groups[2].rollout.completions[1].logprobs[0] = np.nan
    rows, sequences = [], sequences_of(groups)
    for s, of_response in zip(sequences, rows_before(learner, sequences), strict=True):
        rows += [(s, row, token) for row, token in zip(of_response, s.response_token_ids, strict=True)]
    entropies = [torch.distributions.Categorical(logits=row).entropy().item() for _, row, _ in rows]
    advantages = np.array([s.advantage for s, _, _ in rows])
    log_probs = np.array([row[token].item() for _, row, token in rows])
    covariance = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    updates, _ = updates_of(learner, groups)
    first_epoch = [s for update in updates[: len(updates) // epochs] for s in update.sequences]
    chosen: list[float] = []
    for s in sequences_of(groups):
        (trained,) = [t for t in first_epoch if np.array_equal(t.response_token_ids, s.response_token_ids)]
        chosen += (trained.token_penalties if selection == "kl_cov" else trained.token_weights).tolist()
    if selection == "top_entropy":
        assert chosen == [float(entropy >= np.quantile(entropies, 0.7)) for entropy in entropies]
    elif selection == "clip_cov":
        left_out = [c for c, weight in zip(covariance, chosen, strict=True) if not weight]
        assert len(left_out) == round(0.1 * len(chosen))
        assert all(0.01 < c < 2.0 for c in left_out)
    else:
        bound = sorted(covariance, reverse=True)[round(0.1 * len(chosen)) - 1]
        assert chosen == pytest.approx([0.7 * (c >= bound) for c in covariance])


@pytest.mark.parametrize(("old", "noise"), [("proximal", 0.3), ("behaviour", 1e-6)])
def test_rounding_moves_no_penalized_token(make_learner: MakeLearner, old: str, noise: float) -> None:
    """Before the first update, |log(pi / pi_old)| would have the sign of the rounding."""
    gradients = []
    for selection, tokens in (("none", 4096), ("kl_cov", 16), ("kl_cov", 4096)):
        options = {"token_selection": selection, "old_log_probs": old, "train_batch_size": 6}
        learner = make_learner(algorithm=options, learner={"micro_batch_tokens": tokens})
        updates, _ = updates_of(learner, all_with_signal(make_batch(learner, noise=noise)))
        gradients.append(updates[0].gradient)
    assert max(relative_difference(each, gradients[0]) for each in gradients[1:]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.kept("token_mean", "prompt_mean")
def test_every_aggregation_over_parts_of_groups(make_learner: MakeLearner, aggregation: str) -> None:
    options = {"aggregation": aggregation, "train_batch_size": 4, "mask_truncated": True}
    learner = make_learner(algorithm=options, learner={"micro_batch_tokens": 40})
    groups = cut_off(all_with_signal(make_batch(learner)), {(0, 0), (0, 2), (3, 1)})
    groups[1].rollout.completions[0].logprobs[0] = np.nan
    updates, metrics = updates_of(learner, groups)
    assert [len(update.sequences) for update in updates] == [3, 3, 3]  # three of twelve were cut off
    losses, norms = zip(*((u.expected_loss, u.expected.norm().item()) for u in updates), strict=True)
    assert metrics["loss/policy"] == pytest.approx(np.mean(losses), rel=1e-4, abs=1e-6)
    assert metrics["optim/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["loss/untrained_frac"] == 0  # a token without the sampler's logprob is not in the loss


BAND = {"off_policy_correction": "mask_band", "correction_band": (3, 4), "loss": "reinforce_with_baseline"}


@pytest.mark.parametrize(
    ("options", "is_cut_off"),
    [(BAND, False), ({"mask_truncated": True}, True), ({"mask_truncated": True, "epochs_per_batch": 2}, True)],
)
def test_a_batch_of_which_nothing_is_trained_leaves_the_weights(
    make_learner: MakeLearner, options: dict[str, Any], is_cut_off: bool
) -> None:
    learner = make_learner(algorithm=options, learner={"weight_decay": 0.1})
    for parameter in learner.masters.parameters:
        parameter.grad = torch.ones_like(parameter)
    learner._update(0.0)  # which leaves moments in the optimizer
    groups = make_batch(learner, noise=0.0)
    if is_cut_off:
        groups = cut_off(groups, {(i, j) for i in range(4) for j in range(3)})
    before = flat_weights(learner.model)
    metrics = step(learner, groups)
    assert learner.version == 1
    assert (metrics["loss/policy"], metrics["optim/grad_norm"]) == (0.0, 0.0)
    assert torch.equal(flat_weights(learner.model), before)


def by_log_ratios(learner: Learner, log_ratios: np.ndarray) -> ScoredGroup:
    """Make a group of two equal responses with the given differences of logprobs, Learner minus sampler."""
    response = [21, 22, 23, 24][: len(log_ratios)]
    with torch.no_grad():
        own = own_logprobs(learner, [1, 2], response).numpy()
    completion = make_completion(response, (own - log_ratios).tolist())
    return make_group(make_item(0, [1, 2]), [completion] * 2, [1, 0], [1.0, -0.5])


MISMATCH = ("mismatch/kl", "mismatch/logprob_diff/max", "mismatch/ess_frac")
POPULATION = {  # everything that decides which responses are computed, and when
    "one update": {},
    "without a ratio": {"loss": "reinforce_with_baseline"},
    "several epochs": {"epochs_per_batch": 2},
    "proximal": {"old_log_probs": "proximal"},
    "proximal, several epochs": {"old_log_probs": "proximal", "epochs_per_batch": 2},
    "truncated": {"old_log_probs": "proximal", "off_policy_correction": "truncate_token"},
    "masked, several epochs": {
        "old_log_probs": "proximal", "off_policy_correction": "mask_band", "epochs_per_batch": 2,
    },
    "with KL": {"kl": {"reference": "initial", "coefficient": 0.1}},
    "with an entropy bonus": {"entropy_bonus": 0.1},
}  # fmt: skip


def mismatch_by_hand(learner: Learner, sequences: Sequence[TrainSequence]) -> list[float]:
    """Compute k3, the largest difference and Kish's share over the tokens with an advantage."""
    differences = []
    for s, rows in zip(sequences, rows_before(learner, sequences), strict=True):
        if s.advantage:
            own = [row[token].item() for row, token in zip(rows, s.response_token_ids, strict=True)]
            differences.append(own - s.behaviour_logprobs)
    log_ratios = np.concatenate(differences)
    weights = np.exp(log_ratios)
    kish = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    return [(weights - 1 - log_ratios).mean(), np.abs(log_ratios).max(), kish]


def measured(metrics: dict[str, float]) -> list[str]:
    """Return the names of what is measured over the tokens with an advantage."""
    names = ("mismatch/", "correction/", "loss/clip_frac", "policy/entropy")
    return [name for name in metrics if name.startswith(names)]


@pytest.mark.slow
@pytest.mark.parametrize("options", POPULATION.values(), ids=POPULATION)
def test_mismatch_is_of_the_same_tokens_in_each_configuration(make_learner: MakeLearner, options: dict) -> None:
    """Groups 1 and 3 have no signal: some configurations compute them, and their mismatch is another.

    In a batch of these alone no token has an advantage: no 0 and no 1 stands for a measurement.
    """
    learner = make_learner(algorithm=options, learner={"learning_rate": 0.0}, sampling={"temperature": 0.7})
    groups = make_batch(learner)
    for completion in groups[1].rollout.completions:
        completion.logprobs[:] -= 2.0
    expected = mismatch_by_hand(learner, sequences_of(groups))
    metrics = step(learner, groups)
    assert [metrics[name] for name in MISMATCH] == pytest.approx(expected, rel=1e-3)
    rows = [row for own in rows_before(learner, sequences_of([groups[0], groups[2]])) for row in own]
    mean = np.mean([torch.distributions.Categorical(logits=row).entropy().item() for row in rows])
    assert metrics["policy/entropy/exact"] == pytest.approx(mean, rel=1e-4)
    without = step(learner, [groups[1], groups[3]])
    assert measured(without) == []
    assert ("loss/kl_ref" in without) == ("kl" in options)


@pytest.mark.slow
@pytest.mark.parametrize("old", ["behaviour", "proximal"])
def test_mismatch_of_minibatches_is_that_of_the_first(make_learner: MakeLearner, old: str) -> None:
    learner = make_learner(algorithm={"old_log_probs": old, "train_batch_size": 6})
    without = make_batch(learner)
    groups = [*all_with_signal(without)[:3], without[3]]  # the last has no signal
    first_policy = make_learner()
    updates, metrics = updates_of(learner, groups)
    expected = mismatch_by_hand(first_policy, updates[0].sequences)
    assert [metrics[name] for name in MISMATCH] == pytest.approx(expected, rel=1e-3)
    assert measured(step(learner, [without[1], without[3]])) == []


def test_the_scale_of_the_gradient_is_measured_where_the_loss_alone_makes_it(make_learner: MakeLearner) -> None:
    learner = make_learner()
    sequences = sequences_of(make_batch(learner, noise=0.0)[:1])
    sums = learner.accumulate_gradient(sequences)
    assert sums["gradient_sum"] == pytest.approx(sums["plain_gradient_sum"], rel=1e-4)
    selected = []
    for s in sequences:
        ones = np.ones(s.num_sampled, np.float32)
        selected.append(replace(s, token_weights=ones, token_penalties=ones))
    assert "gradient_sum" not in learner.accumulate_gradient(selected)
    for bent in ({"loss": "vespo"}, {"loss": "dppo_tv", "loss_options": {"kl_tau": 1.0}}):
        assert "gradient_sum" not in make_learner(algorithm=bent).accumulate_gradient(sequences)


LOW, HIGH = math.exp(-0.5), math.exp(0.5)


@pytest.mark.parametrize("tokens", [1, 100_000])
@pytest.mark.parametrize(
    ("kind", "band", "weights", "num_limited"),
    [
        ("truncate_token", (0.3, 1.65), [LOW, 1, 1, HIGH, 1.65], 1),
        ("mask_band", (0.3, 1.65), [LOW, 1, 1, HIGH, 0], 1),
        (("mask_product", "truncate_token"), (0.7, None), [0, 0, 1, HIGH, 1.65], 3),  # multiplied
    ],
)
def test_weights_of_a_correction_by_hand(
    make_learner: MakeLearner, kind: Any, band: tuple[float, float | None], weights: list[float],
    num_limited: int, tokens: int,
) -> None:  # fmt: skip
    """The smallest and the largest weight come from different micro-batches, if each holds one response."""
    options = {"old_log_probs": "proximal", "off_policy_correction": kind}
    options |= {"correction_cap": 1.65, "correction_band": band}
    learner = make_learner(algorithm=options, learner={"micro_batch_tokens": tokens})
    low, high = (by_log_ratios(learner, np.array(log_ratios)) for log_ratios in ([-0.5, 0.0], [0.0, 0.5, 1.0]))
    metrics = step(learner, [low, high])
    assert metrics["correction/weight/mean"] == pytest.approx(np.mean(weights), rel=1e-4)
    assert metrics["correction/weight/min"] == pytest.approx(min(weights), rel=1e-4)
    assert metrics["correction/weight/max"] == pytest.approx(max(weights), rel=1e-4)
    assert metrics["correction/limited_frac"] == pytest.approx(num_limited / 5)
    assert metrics["correction/dropped_frac"] == pytest.approx(weights.count(0) / 5)


def test_recipe_of_rloo_is_the_papers_gradient(make_learner: MakeLearner) -> None:
    """The completion is one action: A times the SUM of its tokens' gradients (arXiv:2402.14740, Eq. 8)."""
    learner = make_learner(algorithm=dict(PRESETS["rloo"].fields))
    groups, all_rewards = [], ([1, 0, 0], [0, 2, 1], [0, 1, 1], [3, 1, 0])
    for group, rewards in zip(make_batch(learner, noise=0.0), all_rewards, strict=True):
        advantages = [r - (sum(rewards) - r) / 2 for r in rewards]
        groups.append(make_group(group.rollout.item, group.rollout.completions, rewards, advantages))
    advantages = group_advantages(torch.tensor([[3.0, 1.0, 0.0]]), learner._config.algorithm.advantage_kind)
    assert advantages[0].tolist() == pytest.approx(groups[3].advantages.tolist())
    total: Any = 0.0
    sequences = sequences_of(groups)
    for s in sequences:
        log_probs = own_logprobs(learner, s.prompt_token_ids, s.response_token_ids.tolist())
        total = total - s.advantage * log_probs.sum() / len(sequences)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(total, [*learner.model.parameters()])])
    learner.accumulate_gradient(sequences)
    assert torch.cosine_similarity(gradient(learner), expected, dim=0).item() == pytest.approx(1.0, abs=1e-5)
    assert relative_difference(gradient(learner) * MAX_TOKENS, expected) < 1e-5


def move_reference(learner: Learner) -> None:
    """Move the reference away from the policy, so that there is a distance."""
    perturb(learner._reference.model, seed=3, scale=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("term", ["entropy", "kl"])
def test_groups_without_signal_have_the_added_terms(make_learner: MakeLearner, term: str) -> None:
    kl = {"reference": "initial", "coefficient": 0.7}
    learner = make_learner(algorithm={"kl": kl} if term == "kl" else {"entropy_bonus": 0.5})
    if term == "kl":
        move_reference(learner)
    groups = make_batch(learner)
    (_,), metrics = updates_of(learner, [groups[1], groups[3]])
    assert metrics["throughput/trained_tokens"] > 0


@pytest.mark.slow
def test_everything_at_once(make_learner: MakeLearner) -> None:
    options = {
        "loss": "grpo_clip", "aggregation": "token_mean", "cliprange_high": 0.28, "dual_clip": 2.0,
        "epochs_per_batch": 2, "train_batch_size": 4, "old_log_probs": "proximal",
        "off_policy_correction": "truncate_token", "entropy_bonus": 0.1, "mask_truncated": True,
        "kl": {"reference": "ema", "coefficient": 0.3, "estimator": "k2"},
    }  # fmt: skip
    learner = make_learner(algorithm=options, sampling={"temperature": 0.7})
    move_reference(learner)
    updates, metrics = updates_of(learner, cut_off(make_batch(learner), {(2, 1)}))
    assert [len(update.sequences) for update in updates] == [4, 4, 3] * 2
    assert metrics["optim/num_updates"] == 6


# ---- age in optimizer updates ----


def ages(metrics: dict[str, float]) -> tuple[float, float | None]:
    return metrics["lag/max"], metrics.get("lag/updates/max")


@pytest.mark.slow
def test_several_updates_make_tokens_older_than_their_lag(make_learner: MakeLearner, tmp_path: Path) -> None:
    four = {"train_batch_size": 6, "epochs_per_batch": 2}
    learner = make_learner(algorithm=four, weight_sync={"max_lag": 1})
    assert ages(step(learner, make_batch(learner, versions=0))) == (0.0, 3.0)  # three updates before the last
    assert ages(step(learner, make_batch(learner, versions=0))) == (1.0, 7.0)  # four more
    resumed = resume(learner, written(learner, tmp_path / "step"))
    for each in (learner, resumed):
        assert ages(step(each, make_batch(learner, versions=1))) == (1.0, 7.0)
        assert ages(step(each, make_batch(learner, versions=3))) == (0.0, 3.0)


@pytest.mark.slow
def test_an_age_counts_no_skipped_update(make_learner: MakeLearner) -> None:
    learner = make_learner(weight_sync={"max_lag": 1})
    groups = make_batch(learner, versions=0)
    groups[0].advantages[0] = np.inf
    metrics = step(learner, groups)
    assert (metrics["optim/skipped_updates"], *ages(metrics)) == (1.0, 0.0, 0.0)
    assert ages(step(learner, make_batch(learner, versions=0))) == (1.0, 0.0)  # still the initial weights
    assert ages(step(learner, make_batch(learner, versions=1))) == (1.0, 1.0)
