"""Advantages over the whole batch: KL in the reward, scale, whitening; by hand and by slow loops."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    changed,
    check_names,
    gradient,
    make_batch,
    make_completion,
    make_group,
    make_item,
    perturb,
    plain_logprobs,
    relative_difference,
)
from episode_batches import make_episode
from episode_groups import random_episode_group
from slow_advantages import slow_batch

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.core.learner import Learner
from grpo_ray.learning.batch_advantages import _penalized, needs_batch, with_batch_advantages
from grpo_ray.learning.sequences import TrainSequence, sequences_of
from grpo_ray.objectives.returns import penalties_to_go
from grpo_ray.types import Completion, ScoredGroup, TrainBatch

MAX_TOKENS = 16
KL = {"reference": "initial", "coefficient": 0.5, "placement": "reward"}
TO_GO = KL | {"placement": "reward_to_go"}


def plain_groups(rng: np.random.Generator, num_groups: int, **options: Any) -> list[ScoredGroup]:
    """Make groups of four responses with any rewards; one logprob is missing, and one response not graded."""
    groups = []
    for place in range(num_groups):
        completions = []
        for _ in range(4):
            length = int(rng.integers(1, MAX_TOKENS + 1))
            cut = "length" if rng.random() < 0.3 else "stop"
            logprobs = (-rng.exponential(1.0, length)).tolist()
            completions.append(make_completion([5] * length, logprobs, finish_reason=cut))
        completions[0].logprobs[0] = np.nan
        rewards = rng.integers(0, 3, 4).tolist()
        errors = {2: "too slow"} if place == 1 else {}
        group = make_group(make_item(place), completions, rewards, [0.0] * 4)
        rewards = np.where([n in errors for n in range(4)], 0, group.rewards)
        groups.append(replace(group, rewards=rewards.astype(np.float32), errors=errors))
    return groups


def config_of(tiny_config: Config, **algorithm: Any) -> Config:
    return changed(tiny_config, algorithm=algorithm, sampling={"max_tokens": MAX_TOKENS})


def keys_of(groups: Sequence[ScoredGroup], sequences: Sequence[TrainSequence]) -> list[tuple[int, int]]:
    """Return the places of group and response of each sequence; responses that were cut off may be missing."""
    keys = []
    for place, group in enumerate(groups):
        own = [s for s in sequences if s.group == place]
        left = list(range(len(group.rewards)))
        for s in own:
            if s.sample is not None:
                keys.append(s.sample)
                continue
            tokens = [group.rollout.completions[n].token_ids for n in left]
            number = left[[t is s.response_token_ids for t in tokens].index(True)]
            left.remove(number)
            keys.append((place, number))
    return keys


def check(groups: list[ScoredGroup], config: Config, seed: int) -> None:
    """Compare with the slow loops."""
    rng = np.random.default_rng(seed)
    groups = compared(groups, config)
    sequences = sequences_of(groups, config.algorithm.mask_truncated)  # with those of a made-up reference
    sequences = [replace(s, reference_logprobs=rng.normal(-1, 0.5, s.num_sampled)) for s in sequences]
    reference: dict[tuple[int, int], list[float]] = {}
    for place, group in enumerate(groups):
        reference |= {(place, number): [] for number in range(len(group.rewards))}
    for key, s in zip(keys_of(groups, sequences), sequences, strict=True):
        assert s.reference_logprobs is not None
        reference[key] += s.reference_logprobs.tolist()
    found, metrics = with_batch_advantages(groups, sequences, config)
    expected = slow_batch(groups, reference, config)
    of_tokens = config.algorithm.advantage_scale == "whiten_tokens"
    by_token: dict[tuple[int, int], list[float]] = {}
    has_signal: dict[tuple[int, int], bool] = {}
    for key, old, new in zip(keys_of(groups, sequences), sequences, found, strict=True):
        assert new.reference_logprobs is old.reference_logprobs
        values = np.broadcast_to(new.advantage, new.num_sampled)
        by_token.setdefault(key, []).extend(values.tolist())
        has_signal[key] = has_signal.get(key, False) or new.has_signal
    for (place, number), values in by_token.items():
        s = expected[place][number]
        is_counted = s.is_trained or not of_tokens
        largest = max(map(abs, s.by_token()), default=0.0) if is_counted else 0.0
        assert has_signal[place, number] == (largest > 1e-6)
        assert values == pytest.approx(expected[place][number].by_token(), rel=1e-4, abs=1e-5)
    assert any(abs(value) > 0.1 for values in by_token.values() for value in values)
    assert check_names(metrics) == []


def compared(groups: list[ScoredGroup], config: Config) -> list[ScoredGroup]:
    """Return the groups with the advantages of the Scorer, which the slow loops compute as well."""
    alone = changed(config, algorithm={"advantage_scale": "group", "kl": {"placement": "loss"}})
    result = []
    for place, group in enumerate(groups):
        samples = slow_batch([group], {(0, n): [] for n in range(len(group.rewards))}, alone)[0]
        if samples[0].is_by_turn:
            of_turns = tuple(np.array(s.advantages, np.float32) for s in samples)
            result.append(replace(group, turn_advantages=of_turns))
        else:
            advantages = np.array([(s.advantages or [0.0])[0] for s in samples], np.float32)
            result.append(replace(group, advantages=advantages))
        assert result[place].group_id == group.group_id
    return result


CASES: list[dict[str, Any]] = [
    {"advantage": "mean", "advantage_scale": "batch", "advantage_eps": 0.1},
    {"advantage": "leave_one_out", "advantage_scale": "batch", "std": "population"},
    {"advantage": "mean", "advantage_scale": "batch", "overlong_buffer_tokens": 6},
    {"advantage": "raw", "advantage_scale": "whiten_tokens", "advantage_eps": 0.1},
    {"advantage": "mean", "advantage_scale": "whiten_tokens", "mask_truncated": True},
    {"advantage": "mean_std", "advantage_scale": "whiten_responses", "std": "population"},
    {"advantage": "raw", "advantage_scale": "whiten_responses", "mask_truncated": True},
    {"loss": "no_baseline", "kl": KL},
    {"advantage": "leave_one_out", "kl": KL},
    {"advantage": "mean", "kl": KL, "overlong_buffer_tokens": 6},
    {"advantage": "leave_one_out", "advantage_scale": "whiten_responses", "kl": KL},
    {"advantage": "mean", "advantage_scale": "batch", "kl": KL},
    {"advantage": "raw", "advantage_scale": "whiten_tokens", "kl": KL},
    {"advantage": "raw", "advantage_scale": "whiten_tokens", "kl": TO_GO},
    {"advantage": "mean", "kl": TO_GO},
    {"advantage": "leave_one_out", "kl": TO_GO, "advantage_scale": "whiten_tokens", "std": "population"},
]


@pytest.mark.parametrize("algorithm", CASES, ids=str)
def test_responses_are_as_in_a_slow_loop(tiny_config: Config, algorithm: dict[str, Any]) -> None:
    config = config_of(tiny_config, **algorithm)
    assert needs_batch(config.algorithm)
    check(plain_groups(np.random.default_rng(1), 3), config, 1)


@pytest.mark.parametrize("discount", [None, 0.5])
@pytest.mark.parametrize("algorithm", [case for case in CASES if "overlong_buffer_tokens" not in case], ids=str)
def test_episodes_are_as_in_a_slow_loop(tiny_config: Config, algorithm: dict, discount: float | None) -> None:
    """With branches, turns of context, any ends, and for a discount with rewards per turn."""
    discounted = {"turn_discount": 1.0 if discount is None else discount}
    config = changed(config_of(tiny_config, **algorithm), episodes=discounted)
    rng = np.random.default_rng(11)
    groups = [random_episode_group(rng, place, 4, discount) for place in range(3)]
    first, *others = groups[0].rollout.completions
    cut = replace(first, turn_rewards=None)  # has no rewards per turn, though the others may
    groups[0] = replace(groups[0], rollout=replace(groups[0].rollout, completions=(cut, *others)))
    check([*groups, *plain_groups(rng, 2)], config, 3)


def test_the_batch_scale_by_hand(tiny_config: Config) -> None:
    """Rewards 1, 0 and 4, 2: centred +-0.5 and +-1, sample variance (0.75^2 + 1.75^2 + 2.25^2 + 0.25^2) / 3."""
    config = config_of(tiny_config, advantage="mean", advantage_scale="batch", advantage_eps=1e-9)
    groups = [
        make_group(make_item(0), [make_completion([1])] * 2, [1, 0], [0.5, -0.5]),
        make_group(make_item(1), [make_completion([1, 2])] * 2, [4, 2], [1, -1]),
    ]
    found, metrics = with_batch_advantages(groups, sequences_of(groups), config)
    std = (8.75 / 3) ** 0.5
    assert [s.advantage for s in found] == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std])
    assert metrics == {"advantage/batch_std": pytest.approx(std)}


def test_reinforce_plus_plus_by_hand(tiny_config: Config) -> None:
    """Rewards 2 and 1; log(sampler / reference) of 2, 0, -4 and of 1, so from each token on -2, -4, -4 and 1.

    A_t = r - 0.5 * that: 3, 4, 4 and 0.5; over these four tokens mean 2.875, population variance 2.0469.
    """
    groups = [
        make_group(make_item(0), [make_completion([1, 2, 3], [-1.0, -2.0, -5.0])], [2]),
        make_group(make_item(1), [make_completion([1], [-1.0])], [1]),
    ]
    pairs = zip(sequences_of(groups), ([-3.0, -2.0, -1.0], [-2.0]), strict=True)
    sequences = [replace(s, reference_logprobs=np.array(reference)) for s, reference in pairs]
    algorithm = {"advantage": "raw", "std": "population", "advantage_eps": 1e-9, "kl": TO_GO}
    found, metrics = with_batch_advantages(groups, sequences, config_of(tiny_config, **algorithm))
    assert [s.advantage.tolist() for s in found] == [[3.0, 4.0, 4.0], [0.5]]
    assert metrics == {"reward/kl_penalty": pytest.approx(0.5 * (-2 + 1) / 2)}
    config = config_of(tiny_config, **algorithm, advantage_scale="whiten_tokens")
    found, metrics = with_batch_advantages(groups, sequences, config)
    std = 2.046875**0.5
    assert metrics["advantage/batch_std"] == pytest.approx(std)
    whitened = [(a - 2.875) / std for a in (3.0, 4.0, 4.0, 0.5)]
    assert [a for s in found for a in s.advantage.tolist()] == pytest.approx(whitened)


def test_later_turns_are_discounted_and_turns_need_not_stand_in_order() -> None:
    """Turns 0 (penalties 1, 2), 1 (8) and 3 (64), of which the third stands first; turn 2 has no token."""
    found = penalties_to_go(np.array([64.0, 1, 2, 8]), np.array([3, 0, 0, 1]), 0.5)
    assert found.tolist() == [64, 3 + 4 + 8, 2 + 4 + 8, 8 + 16]
    assert penalties_to_go(np.array([1.0, 2]), np.array([0, 1]), 0.0).tolist() == [1, 2]
    assert penalties_to_go(np.zeros(0), np.zeros(0, np.int32), 1.0).tolist() == []


@pytest.mark.parametrize("scale", ["batch", "whiten_responses", "whiten_tokens"])
def test_equal_rewards_everywhere_and_nothing_graded_leave_no_signal(tiny_config: Config, scale: str) -> None:
    config = config_of(tiny_config, advantage="mean", advantage_scale=scale)
    equal = make_group(make_item(0), [make_completion([1, 2])] * 3, [0.1] * 3, [0.0] * 3)
    for group in (equal, replace(equal, rewards=0 * equal.rewards, errors=dict.fromkeys(range(3), "slow"))):
        groups = [group] * 2
        found, metrics = with_batch_advantages(groups, sequences_of(groups), config)
        assert [(s.advantage, s.has_signal) for s in found] == [(0.0, False)] * 6
        assert metrics["advantage/batch_std"] == 0.0


@pytest.mark.parametrize("placement", ["reward", "reward_to_go"])
def test_episodes_without_a_sampled_token_have_no_sequence(tiny_config: Config, placement: str) -> None:
    kl = {"reference": "initial", "coefficient": 1.0, "placement": placement}
    group = make_group(make_item(0), [replace(make_episode([]), reward=float(n)) for n in range(2)], [0, 1])
    found = with_batch_advantages([group], [], config_of(tiny_config, advantage="mean", kl=kl))
    assert found == ([], {"reward/kl_penalty": 0.0})


def test_an_episode_that_was_cut_pays_for_the_tokens_of_each_turn(tiny_config: Config) -> None:
    two = replace(make_episode([((1,), (2,)), ((1, 2, 3), (4,))]), reward=0.0)
    group = make_group(make_item(0), [replace(two, turn_rewards=(0.0, 0.0)), two], [0, 0])
    found = _penalized(group, [np.zeros(2), np.array([10.0, 0.0])], config_of(tiny_config, advantage="mean"))
    assert [advantages.tolist() for advantages in found.turn_advantages] == [[5.0, 0.0], [-5.0, 0.0]]


# ---- in the Learner ----


SECTIONS = {"algorithm": {"prompts_per_step": 4, "samples_per_prompt": 3}, "learner": {"max_grad_norm": 1e6}}


def updates_of(
    learner: Learner, groups: Sequence[ScoredGroup]
) -> tuple[list[tuple[list[TrainSequence], torch.Tensor]], dict[str, float]]:
    """Train a step; return the sequences of each update, with their gradient, and the step's metrics."""
    seen: list[Any] = []
    accumulate = learner.accumulate_gradient

    def spy(sequences: Sequence[TrainSequence]) -> Any:
        sums = accumulate(sequences)
        seen.append((list(sequences), gradient(learner)))
        return sums

    learner.accumulate_gradient = spy  # type: ignore[method-assign]
    metrics = learner.train_step(TrainBatch(tuple(groups))).metrics
    assert check_names(metrics) == []
    return seen, metrics


@torch.no_grad()
def logprobs_by(model: Any, learner: Learner, group: ScoredGroup, completion: Completion) -> torch.Tensor:
    sampling, given = learner._config.sampling, (group.rollout.item.prompt_token_ids, completion.token_ids)
    return plain_logprobs(model, *given, sampling.temperature, sampling.min_tokens, ENDS)


def test_the_reward_loses_the_kl_to_the_reference(make_learner: MakeLearner) -> None:
    """A group of equal rewards has signal by its KL; one that was not graded has none, and is not trained."""
    learner = make_learner(algorithm={"kl": KL, "loss": "reinforce_with_baseline", "advantage": "mean"})
    assert learner._reference is not None
    perturb(learner._reference.model, seed=3, scale=0.02)
    groups = make_batch(learner)
    assert [group.has_signal for group in groups] == [True, False, True, False]
    groups[3] = replace(groups[3], errors=dict.fromkeys(range(3), "too slow"))
    expected, penalties = [], []
    for group in groups:
        rewards = []
        for reward, c in zip(group.rewards.tolist(), group.rollout.completions, strict=True):
            own = logprobs_by(learner._reference.model, learner, group, c)
            penalties.append(0.5 * float((torch.from_numpy(c.logprobs) - own).sum()))
            rewards.append(reward - penalties[-1])
        expected += [0.0] * 3 if group.errors else [r - fmean(rewards) for r in rewards]
    ((sequences, of_update),), metrics = updates_of(learner, groups)
    assert [s.advantage for s in sequences] == pytest.approx(expected, rel=1e-3, abs=1e-3)
    assert metrics["reward/kl_penalty"] == pytest.approx(fmean(penalties), rel=1e-4)
    assert metrics["throughput/trained_tokens"] == sum(s.num_sampled for s in sequences[:9])
    assert metrics["loss/kl_ref"] != 0
    # The gradient is that of the advantages alone.
    without = make_learner(algorithm={"loss": "reinforce_with_baseline"})
    without.accumulate_gradient([replace(s, reference_logprobs=None) for s in sequences])
    assert relative_difference(of_update, gradient(without)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kl", [KL, TO_GO])
def test_of_old_tokens_the_kl_in_the_reward_is_the_current_policys(make_learner: MakeLearner, kl: dict) -> None:
    """Sampled by version 0 and trained at version 1, without the sampler's logprobs anywhere in the penalty."""
    learner = make_learner(algorithm={"kl": kl, "advantage": "mean"})
    assert learner._reference is not None
    perturb(learner._reference.model, seed=3, scale=0.02)
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    groups = make_batch(learner, seed=1, versions=0)
    models, penalties = (learner.model, learner._reference.model), []
    for group in groups:
        for c in group.rollout.completions:
            policy, reference = (logprobs_by(model, learner, group, c) for model in models)
            penalties.append(0.5 * float((policy - reference).sum()))
    _, metrics = updates_of(learner, groups)
    assert metrics["lag/max"] == 1
    assert max(map(abs, penalties)) > 1e-3
    assert metrics["reward/kl_penalty"] == pytest.approx(fmean(penalties), rel=1e-3, abs=1e-5)


def test_minibatches_have_the_advantages_of_the_whole_batch(make_learner: MakeLearner) -> None:
    learner = make_learner(algorithm={"advantage": "mean", "advantage_scale": "batch", "train_batch_size": 4})
    groups = make_batch(learner)
    whole, _ = with_batch_advantages(groups, sequences_of(groups), learner._config)
    updates, _ = updates_of(learner, groups)
    seen = [s for sequences, _ in updates for s in sequences]
    by_tokens = {s.response_token_ids.tobytes(): s.advantage for s in whole}
    assert (len(updates), len(seen)) == (3, len(whole))
    assert all(by_tokens[s.response_token_ids.tobytes()] == s.advantage for s in seen)


def test_the_default_needs_no_batch() -> None:
    assert not needs_batch(AlgorithmConfig())
    assert not needs_batch(AlgorithmConfig(kl={"reference": "initial", "coefficient": 0.1}))
