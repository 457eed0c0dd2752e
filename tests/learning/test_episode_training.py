"""Sequences of episodes in the Learner; their gradients: tests/objectives/test_algorithm_combinations.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    TinyModel,
    changed,
    make_completion,
    make_group,
    make_item,
    plain_logprobs,
)
from episode_batches import make_episode, random_batch

from grpo_ray.config import Config
from grpo_ray.core.staleness import StaleBatchError, lag_metrics
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.log_probs import ResponseLogProbs
from grpo_ray.learning.microbatch import collate_padded
from grpo_ray.learning.sequences import NEVER, minibatches, samples_of, sequences_of
from grpo_ray.types import CONTEXT, ScoredGroup, TrainBatch

SECTIONS = {"algorithm": {"prompts_per_step": 3, "samples_per_prompt": 3}}


def test_an_episode_of_one_turn_is_a_plain_completion_to_the_bit() -> None:
    prompt, replies = (1, 2), ([5, 6, 7], [8])
    both = map(make_completion, replies), (make_episode([(prompt, reply)]) for reply in replies)
    plain, own = (sequences_of([make_group(make_item(0, prompt), [*each], [1, 0])]) for each in both)
    for one, other in zip(plain, own, strict=True):
        assert vars(one).keys() == vars(other).keys()
        for name, value in vars(replace(one, sample=other.sample)).items():
            np.testing.assert_array_equal(getattr(other, name), value, err_msg=name)
            assert type(getattr(other, name)) is type(value), name


def two_turns_and_a_branch() -> ScoredGroup:
    turns = [([1, 2], [30, 31]), ([1, 2, 30, 31, 5, 6], [32, 33, 34]), ([1, 2, 31, 7], [35])]
    episode = make_episode(turns, versions=[0, 1, 1])
    return make_group(make_item(0, [1, 2]), [episode, make_completion([36, 37])], [1, 0], [0.5, -0.5])


def test_places_in_a_turn_count_its_tokens_that_are_left_out() -> None:
    """Old tokens of a turn that began at version 0 are masked; the next was still the third of its turn."""
    episode = make_episode([([1, 2], [30, 31, 32]), ([1, 2, 30, 31, 32, 5], [33])], versions=[0, 1])
    old = replace(episode, versions=np.array([0, 0, 1, CONTEXT, 1], np.int32)).masked_before(1)
    (sequence,) = sequences_of([make_group(make_item(0, [1, 2]), [old], [1.0], [1.0])])
    assert sequence.mask is not None
    assert sequence.mask.tolist() == [False, False, True, False, True]
    assert sequence.turn_places is not None
    assert sequence.turn_places.tolist() == [2, 0]


def test_sequences_of_an_episode_by_hand() -> None:
    group = replace(two_turns_and_a_branch(), turn_advantages=(np.float32([1, 2, 3]), np.float32([4])))
    first, second, plain = sequences_of([group])
    assert first.prompt_token_ids == (1, 2)
    assert first.response_token_ids.tolist() == [30, 31, 5, 6, 32, 33, 34]
    assert first.mask is not None
    assert first.mask.tolist() == [True, True, False, False, True, True, True]
    assert first.turn_places is not None
    assert first.turn_places.tolist() == [0, 1, 0, 1, 2]
    assert np.asarray(first.advantage).tolist() == [1, 1, 2, 2, 2]
    assert (first.num_sampled, first.switch, len(first)) == (5, 2, 9)
    assert second.prompt_token_ids == (1, 2, 31, 7)
    assert (second.mask, second.turn_places, second.switch) == (None, None, NEVER)
    assert np.asarray(second.advantage).tolist() == [3]
    assert [s.sample for s in (first, second, plain)] == [(0, 0), (0, 0), None]
    batch = collate_padded([first, second])
    assert batch.labels.tolist() == [30, 31, 32, 33, 34, 35]
    assert batch.sources.tolist() == [1, 2, 5, 6, 7, 9 + 3]
    assert batch.places.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.turn_places.tolist() == [0, 1, 0, 1, 2, 0]
    assert batch.response_mask.tolist() == [[True] * 5, [True] + [False] * 4]
    assert batch.advantages.tolist() == [[1, 1, 2, 2, 2], [3, 0, 0, 0, 0]]
    assert (batch.num_prompt_tokens, batch.num_padding_tokens) == (2 + 2 + 4, 4)


def test_an_episode_without_a_reward_has_its_own_advantage_in_place_of_those_of_its_turns() -> None:
    """The Scorer gives it 0; NaN marks it while a batch is whitened."""
    for own in (0.0, np.nan):
        no_turns, other = np.zeros(0, np.float32), np.float32([4])
        advantages = np.array([own, -0.5], np.float32)
        group = replace(two_turns_and_a_branch(), advantages=advantages, turn_advantages=(no_turns, other))
        assert np.array_equal([s.advantage for s in sequences_of([group])[:2]], [own, own], equal_nan=True)


def test_truncated_episodes_and_those_without_samples_yield_nothing() -> None:
    group = two_turns_and_a_branch()
    episode, _ = group.rollout.completions
    cut, empty = replace(episode, finish_reason="length"), make_episode([])
    of_both = replace(group, rollout=replace(group.rollout, completions=(cut, empty)))
    assert sequences_of([of_both], mask_truncated=True) == []
    assert len(sequences_of([of_both])) == 2
    unsampled = replace(episode, versions=np.full_like(episode.versions, -1))
    assert sequences_of([make_group(make_item(), [unsampled, empty])]) == []


def test_minibatches_hold_whole_episodes(make_learner: MakeLearner) -> None:
    learner = make_learner()
    sequences = sequences_of(random_batch(9, learner.model, learner._config)[0])
    assert len(sequences) > len(samples_of(sequences)) == 9
    updates = minibatches(sequences, 4, 2, "0")
    assert [len(samples_of(update)) for update in updates] == [3] * 6
    for epoch in (updates[:3], updates[3:]):
        assert sorted(id(s) for update in epoch for s in update) == sorted(map(id, sequences))
        owners = [{s.sample for s in update if s.sample is not None} for update in epoch]
        assert sum(map(len, owners)) == len(set.union(*owners)) == 6


def test_end_tokens_are_impossible_as_a_turn_starts(make_learner: MakeLearner, tiny_model: TinyModel) -> None:
    model = load_policy(str(tiny_model()))
    sampling = make_learner(sampling={"min_tokens": 2})._config.sampling
    end = ENDS[1]
    turns = [([20, 21], [22, end, end, 23]), ([20, 21, 22, end, end, 23, 24], [end, 25, end])]
    sequences = sequences_of([make_group(make_item(0, [20, 21]), [make_episode(turns)], [1])])
    with torch.no_grad():
        found, _ = ResponseLogProbs(sampling, ENDS)(model, collate_padded(sequences))
    expected = [plain_logprobs(model, *turn, sampling.temperature, 2, ENDS) for turn in turns]
    possible = [0, 2, 3, 5, 6]  # of the seven tokens
    torch.testing.assert_close(found[0, possible], torch.cat(expected)[possible], atol=1e-5, rtol=0)
    assert (found[0, [1, 4]] < -1e30).all()


def test_a_step_without_any_sampled_token_changes_nothing(make_learner: MakeLearner) -> None:
    for options in ({}, {"train_batch_size": 3, "old_log_probs": "proximal", "epochs_per_batch": 2}):
        learner = make_learner(algorithm=options)
        before = learner.masters.parameters[0].detach().clone()
        group = make_group(make_item(), [make_episode([]), make_episode([])], [1, 0])
        metrics = learner.train_step(TrainBatch((group,))).metrics
        assert learner.version == 1
        assert metrics["throughput/trained_tokens"] == metrics["optim/skipped_updates"] == 0
        assert torch.equal(learner.masters.parameters[0], before)


def test_lag_is_that_of_sampled_tokens(tiny_config: Config) -> None:
    group = two_turns_and_a_branch()
    config = changed(tiny_config, weight_sync={"max_lag": 1})
    # Versions 0 twice and 1 four times in the episode, 0 twice in the completion.
    assert lag_metrics([group], 1, config) == {"lag/mean": 0.5, "lag/max": 1.0}
    with pytest.raises(StaleBatchError, match="version 0 reached"):
        lag_metrics([group], 2, config)
