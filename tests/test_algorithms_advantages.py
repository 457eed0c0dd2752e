"""Advantages by hand, and what must hold for any rewards."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.algorithms import compute_group_normalized_rewards, group_advantages

REWARDS = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]])  # mean 0.6, sample std sqrt(0.3) = 0.5477

reward_lists = st.lists(st.integers(-8, 8), min_size=2, max_size=6)


def last_char_reward(response: str, ground_truth: str) -> dict[str, float]:
    """Format: the response ends in a digit. Answer: it is the right one."""
    answer = float(response[-1] == ground_truth)
    return {"reward": answer, "format_reward": float(response[-1].isdigit()), "answer_reward": answer}


def test_advantages_with_std_by_hand():
    advantages = group_advantages(REWARDS, 0.0, normalize_by_std=True)
    expected = torch.tensor([[0.7303, 0.7303, -1.0954, 0.7303, -1.0954]])
    torch.testing.assert_close(advantages, expected, atol=1e-4, rtol=0)


def test_advantages_without_std_by_hand():
    advantages = group_advantages(REWARDS, 1e-6, normalize_by_std=False)
    torch.testing.assert_close(advantages, torch.tensor([[0.4, 0.4, -0.6, 0.4, -0.6]]))


def test_eps_is_added_to_the_std_not_to_the_variance():
    advantages = group_advantages(torch.tensor([[1.0, -1.0]]), 0.5, normalize_by_std=True)
    value = 1 / (2**0.5 + 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[value, -value]]))


def test_each_group_has_its_own_mean_and_std():
    advantages = group_advantages(torch.tensor([[0.0, 1.0], [10.0, 30.0]]), 0.0, normalize_by_std=True)
    half = 0.5**0.5
    torch.testing.assert_close(advantages, torch.tensor([[-half, half], [-half, half]]))


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("group_size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(group_size, normalize_by_std):
    rewards = torch.full((2, group_size), 0.1)
    rewards[1] = 1 / 3
    assert torch.equal(group_advantages(rewards, 1e-12, normalize_by_std), torch.zeros(2, group_size))


def test_rewards_must_have_a_group_axis():
    with pytest.raises(ValueError, match=r"\[groups, G\]"):
        group_advantages(torch.ones(4), 1e-6, True)


@settings(max_examples=60, deadline=None)
@given(rewards=reward_lists, shift=st.integers(-16, 16), normalize_by_std=st.booleans())
def test_a_constant_added_to_a_group_changes_nothing(rewards, shift, normalize_by_std):
    group = torch.tensor([rewards], dtype=torch.float64)
    torch.testing.assert_close(
        group_advantages(group + shift, 1e-6, normalize_by_std),
        group_advantages(group, 1e-6, normalize_by_std),
        rtol=1e-9,
        atol=1e-9,
    )


@settings(max_examples=60, deadline=None)
@given(rewards=reward_lists, scale=st.integers(2, 9))
def test_scale_divides_out_with_the_std_only(rewards, scale):
    group = torch.tensor([rewards], dtype=torch.float64)
    with_std = group_advantages(group, 0.0, normalize_by_std=True)
    torch.testing.assert_close(group_advantages(scale * group, 0.0, normalize_by_std=True), with_std)
    without_std = group_advantages(group, 0.0, normalize_by_std=False)
    torch.testing.assert_close(group_advantages(scale * group, 0.0, False), scale * without_std)


@settings(max_examples=60, deadline=None)
@given(rewards=reward_lists)
def test_advantages_are_centred_with_unit_sample_std(rewards):
    group = torch.tensor([rewards], dtype=torch.float64)
    advantages = group_advantages(group, 0.0, normalize_by_std=True)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-9)
    if len(set(rewards)) > 1:
        assert advantages.square().sum().item() == pytest.approx(len(rewards) - 1)


def test_scoring_a_batch_by_hand():
    responses = ["a1", "a2", "ax", "b7", "b7", "b7"]
    truths = ["1", "1", "1", "7", "7", "7"]
    advantages, raw_rewards, metadata = compute_group_normalized_rewards(
        last_char_reward, responses, truths, group_size=3, advantage_eps=0.0, normalize_by_std=False
    )
    assert raw_rewards.tolist() == [1, 0, 0, 1, 1, 1]
    torch.testing.assert_close(advantages, torch.tensor([2 / 3, -1 / 3, -1 / 3, 0, 0, 0]))
    assert metadata == pytest.approx(
        {
            "reward/mean": 4 / 6,
            "reward/std": (8 / 30) ** 0.5,  # (4 * (1/3)^2 + 2 * (2/3)^2) / 5
            "reward/min": 0.0,
            "reward/max": 1.0,
            "reward/format": 5 / 6,
            "reward/answer": 4 / 6,
            "rollout/zero_variance_groups": 1.0,
        }
    )
    assert all(type(value) is float for value in metadata.values())


def test_the_std_option_reaches_the_advantages():
    arguments = (last_char_reward, ["1", "1", "0", "1", "0"], ["1"] * 5, 5, 0.0)
    with_std = compute_group_normalized_rewards(*arguments, normalize_by_std=True)[0]
    without_std = compute_group_normalized_rewards(*arguments, normalize_by_std=False)[0]
    torch.testing.assert_close(with_std * 0.3**0.5, without_std)


def test_one_response_has_no_nan():
    advantages, _, metadata = compute_group_normalized_rewards(last_char_reward, ["1"], ["1"], 1, 1e-6, True)
    assert advantages.tolist() == [0.0]
    assert metadata["reward/std"] == 0.0


@pytest.mark.parametrize(
    ("num_responses", "num_truths", "group_size", "message"),
    [
        (4, 3, 2, "4 rollout_responses but 3 repeated_ground_truths"),
        (5, 5, 2, "group_size 2"),
        (0, 0, 2, "0 rollout_responses"),
        (2, 2, 0, "group_size 0"),
    ],
)
def test_batches_that_do_not_fit_are_refused(num_responses, num_truths, group_size, message):
    with pytest.raises(ValueError, match=message):
        compute_group_normalized_rewards(
            last_char_reward, ["1"] * num_responses, ["1"] * num_truths, group_size, 1e-6, True
        )
