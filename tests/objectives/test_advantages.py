"""Advantages by hand and against plain loops over any rewards, and overlong penalties by hand."""

from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.objectives import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageKind,
    compute_group_normalized_rewards,
    group_advantages,
)
from grpo_ray.objectives.advantages import overlong_penalties

REWARDS = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]])  # mean 0.6, sample std sqrt(0.3) = 0.5477

OPTIONS = {"pass_at_k": {"k": 2}}


def last_char_reward(response: str, ground_truth: str) -> dict[str, float]:
    """Reward a last character that is the right digit; any digit has the right format."""
    answer = float(response[-1] == ground_truth)
    return {"reward": answer, "format_reward": float(response[-1].isdigit()), "answer_reward": answer}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mean_std", [0.7303, 0.7303, -1.0954, 0.7303, -1.0954]),
        ("mean", [0.4, 0.4, -0.6, 0.4, -0.6]),
        ("leave_one_out", [0.5, 0.5, -0.75, 0.5, -0.75]),  # 1 - 2/4 and 0 - 3/4
        ("max_only", [1.0, 1.0, 0.0, 1.0, 0.0]),
        ("raw", [1.0, 1.0, 0.0, 1.0, 0.0]),
        ("max_rl", [0.6667, 0.6667, -1.0, 0.6667, -1.0]),  # 0.4 / 0.6, -0.6 / 0.6
        # Of 10 pairs one fails, so std is 0.3; of the 4 pairs with a wrong response one: (0.1 - 0.25) / 0.3.
        ("pass_at_k", [0.3333, 0.3333, -0.5, 0.3333, -0.5]),
        ("gdpo", [0.7303, 0.7303, -1.0954, 0.7303, -1.0954]),  # without parts as `mean_std`
    ],
)
def test_advantages_by_hand(kind, expected):
    advantages = group_advantages(REWARDS, kind, advantage_eps=0.0, **OPTIONS.get(kind, {}))
    torch.testing.assert_close(advantages, torch.tensor([expected]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("kind", "std"),
    [
        *((kind, "sample") for kind in ("mean_std", "mean", "leave_one_out", "max_rl", "pass_at_k", "gdpo")),
        ("mean_std", "population"),
    ],
)
@pytest.mark.parametrize("group_size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(group_size, kind, std):
    if kind == "leave_one_out":
        group_size += 1
    rewards = torch.full((2, group_size), 0.1)
    rewards[1] = 1 / 3
    options = OPTIONS.get(kind, {})
    advantages = group_advantages(rewards, kind, advantage_eps=1e-12, std=std, **options)
    assert torch.equal(advantages, torch.zeros(2, group_size))


def test_raw_is_a_copy():
    rewards = REWARDS.clone()
    group_advantages(rewards, "raw").zero_()
    assert torch.equal(rewards, REWARDS)


@pytest.mark.parametrize("kind", get_args(AdvantageKind))
def test_nan_is_not_hidden(kind):
    rewards = torch.tensor([[1.0, torch.nan, 0.0]])
    assert group_advantages(rewards, kind, **OPTIONS.get(kind, {}))[0, 1].isnan()


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match=r"\[groups, G\]"):
        group_advantages(torch.ones(4))
    with pytest.raises(ValueError, match=r"floats .*, got torch.int64"):
        group_advantages(torch.ones(1, 4, dtype=torch.int64), "pass_at_k", k=2)
    with pytest.raises(ValueError, match=r"reward_fn returned 1.0, not a dict"):
        compute_group_normalized_rewards(lambda *_: 1.0, ["1"], ["1"], 1, 1e-6, True)
    with pytest.raises(ValueError, match=r"leave_one_out.*at least 2"):
        group_advantages(torch.ones(4, 1), "leave_one_out")
    with pytest.raises(ValueError, match=r"'max'.*mean_std, mean, .*raw, max_rl, pass_at_k, gdpo"):
        group_advantages(REWARDS, "max")
    with pytest.raises(ValueError, match=r"'biased'.*sample, population"):
        group_advantages(REWARDS, std="biased")


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=4, max_size=4), min_size=1, max_size=3))
def test_groups_are_compared_as_in_a_loop(rows):
    for std, deviation in (("sample", stdev), ("population", pstdev)):
        expected = {kind: [] for kind in ADVANTAGES if kind != "pass_at_k"}
        for rewards in rows:
            middle, spread = fmean(rewards), deviation(rewards)
            for r in rewards:
                expected["mean_std"].append((r - middle) / (spread + 0.5))
                expected["gdpo"].append((r - middle) / (spread + 0.5))  # as it has no parts here
                expected["mean"].append(r - middle)
                expected["leave_one_out"].append(r - (sum(rewards) - r) / 3)
                expected["max_only"].append(r if r == max(rewards) else 0)
                expected["max_rl"].append((r - middle) / (middle + 0.5) if middle > 0 else 0)
                expected["raw"].append(r)
        for kind, values in expected.items():
            found = group_advantages(torch.tensor(rows, dtype=torch.float64), kind, std=std, advantage_eps=0.5)
            assert found.flatten().tolist() == pytest.approx(values), (kind, std)


@settings(max_examples=60)
@given(rights=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(rights, data):
    size, k = len(rights), data.draw(st.integers(1, len(rights)))
    subsets = list(combinations(range(size), k))
    best = {subset: float(any(rights[i] for i in subset)) for subset in subsets}
    mean, std = fmean(best.values()), pstdev(best.values())
    slow = [
        fmean((best[s] - mean) / (std + 1e-6) for s in subsets if response in s) for response in range(size)
    ]
    rewards = torch.tensor([rights], dtype=torch.float64)
    advantages = group_advantages(rewards, "pass_at_k", k=k)
    assert advantages[0].tolist() == pytest.approx(slow)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-9)
    if k == 1:
        torch.testing.assert_close(advantages, group_advantages(rewards, std="population"))


def test_pass_at_k_of_more_than_the_group_takes_the_whole_group():
    """Nothing then tells the responses apart; the threshold says what succeeds."""
    rewards = torch.tensor([[1.0, 0.0]])
    assert group_advantages(rewards, "pass_at_k", k=4).tolist() == [[0.0, 0.0]]
    rewards = torch.tensor([[3.0, 2.0, 0.0]])
    high = group_advantages(rewards, "pass_at_k", k=1, threshold=2.0)
    torch.testing.assert_close(high, group_advantages((rewards > 2).float(), std="population"))


def test_gdpo_tells_apart_what_a_sum_does_not():
    """Rewards (right, format) of (0, 1), (0, 2 x format) sum alike for GRPO (arXiv:2601.05242, Figure 2)."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    formats, answers = torch.tensor([[1.0, 1.0, 0.0, 1.0]]), torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    inputs = AdvantageInputs(rewards, formats, answers, torch.ones_like(rewards))
    standardized = [group_advantages(part, advantage_eps=1e-4) for part in (rewards, formats, answers)]
    own = {"reward_weight": 2.0, "format_weight": 0.5, "answer_weight": 0.25}
    for chosen, weights in ((own, own.values()), ({}, (1, 1, 0))):
        found = ADVANTAGES["gdpo"](inputs, **chosen, eps=1e-4)
        expected = sum(weight * part for weight, part in zip(weights, standardized, strict=True))
        torch.testing.assert_close(found, expected)


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


# ---- overlong responses ----


def test_overlong_penalties_by_hand():
    lengths = torch.tensor([0, 1, 12, 13, 14, 16, 17])  # a buffer of 4 before 16: free up to 12
    penalties = overlong_penalties(lengths, max_tokens=16, buffer_tokens=4, penalty=0.5)
    expected = torch.tensor([0.0, 0.0, 0.0, -0.125, -0.25, -0.5, -0.5])
    assert torch.equal(penalties, expected)
    assert not penalties.signbit()[:3].any()  # 0, not -0
    assert penalties.dtype == torch.float32
    lengths = torch.tensor([0, 1, 8])
    assert overlong_penalties(lengths, 8, buffer_tokens=8, penalty=1.0).tolist() == [0.0, -0.125, -1.0]
    assert overlong_penalties(lengths, 4, buffer_tokens=0, penalty=1.0).tolist() == [0.0, 0.0, 0.0]
    assert not overlong_penalties(lengths, 4, buffer_tokens=4, penalty=0.0).any()


@pytest.mark.parametrize(
    ("buffer_tokens", "penalty", "name"),
    [(-1, 1.0, "buffer_tokens"), (9, 1.0, "buffer_tokens"), (4, -1.0, "penalty"), (4, float("nan"), "penalty")],
)
def test_bad_buffers_and_penalties_are_refused(buffer_tokens, penalty, name):
    with pytest.raises(ValueError, match=name):
        overlong_penalties(torch.tensor([1]), 8, buffer_tokens, penalty)
