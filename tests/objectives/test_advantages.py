"""Advantages, also of one's own, by hand and against plain loops over any rewards, and overlong penalties."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any, get_args

import numpy as np
import pytest
import torch
from builders import changed, make_completion, make_group, make_item
from episode_batches import make_episode
from hypothesis import given, settings
from hypothesis import strategies as st
from local_runs import train
from small_run import QUICKSTART, SMALL

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.loading import load_config
from grpo_ray.learning.batch_advantages import with_batch_advantages
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives import (
    ADVANTAGES,
    AdvantageInputs,
    AdvantageKind,
    advantages_of,
    check_algorithm,
    compute_group_normalized_rewards,
    group_advantages,
)
from grpo_ray.objectives.advantages import overlong_penalties
from grpo_ray.objectives.returns import verdict_on
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.preparation import _check_algorithm
from grpo_ray.tools.audit.audit import audit

pytestmark = pytest.mark.usefixtures("own_module")

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
    rewards = REWARDS.clone()
    advantages = group_advantages(rewards, kind, advantage_eps=0.0, **OPTIONS.get(kind, {}))
    torch.testing.assert_close(advantages, torch.tensor([expected]), atol=1e-4, rtol=0)
    advantages.zero_()
    assert torch.equal(rewards, REWARDS)  # also `raw` returns a copy


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
    for num_responses, num_truths, size, message in (
        (4, 3, 2, "4 rollout_responses but 3 repeated_ground_truths"),
        (5, 5, 2, "group_size 2"),
        (0, 0, 2, "0 rollout_responses"),
        (2, 2, 0, "group_size 0"),
    ):
        responses, truths = ["1"] * num_responses, ["1"] * num_truths
        with pytest.raises(ValueError, match=message):
            compute_group_normalized_rewards(last_char_reward, responses, truths, size, 1e-6, True)
    for buffer_tokens, penalty, name in (
        (-1, 1.0, "buffer_tokens"), (9, 1.0, "buffer_tokens"), (4, -1.0, "penalty"), (4, torch.nan, "penalty"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            overlong_penalties(torch.tensor([1]), 8, buffer_tokens, penalty)


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
    scores = {subset: (value - mean) / (std + 1e-6) for subset, value in best.items()}
    slow = [fmean(scores[s] for s in subsets if response in s) for response in range(size)]
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
    std = (8 / 30) ** 0.5  # (4 * (1/3)^2 + 2 * (2/3)^2) / 5
    expected = {"reward/mean": 4 / 6, "reward/std": std, "reward/min": 0.0, "reward/max": 1.0}
    expected |= {"reward/format": 5 / 6, "reward/answer": 4 / 6, "rollout/zero_variance_groups": 1.0}
    assert metadata == pytest.approx(expected)
    assert all(type(value) is float for value in metadata.values())


def test_the_std_option_reaches_the_advantages_and_one_response_has_no_nan():
    arguments = (last_char_reward, ["1", "1", "0", "1", "0"], ["1"] * 5, 5, 0.0)
    with_std = compute_group_normalized_rewards(*arguments, normalize_by_std=True)[0]
    without_std = compute_group_normalized_rewards(*arguments, normalize_by_std=False)[0]
    torch.testing.assert_close(with_std * 0.3**0.5, without_std)
    advantages, _, metadata = compute_group_normalized_rewards(last_char_reward, ["1"], ["1"], 1, 1e-6, True)
    assert advantages.tolist() == [0.0]
    assert metadata["reward/std"] == 0.0


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


ROOT = Path(__file__).parents[2]
MODULE = "my_advantages_4711"
CODE = """
import torch
from grpo_ray.objectives import AdvantageInputs

def median(inputs: AdvantageInputs, *, factor: float = 1.0, eps: float):
    middle = inputs.rewards.quantile(0.5, dim=1, keepdim=True)
    return factor * (inputs.rewards - middle) / (1 + eps)

def parts(inputs: AdvantageInputs):
    return inputs.rewards + 10 * inputs.format_rewards + 100 * inputs.answer_rewards
def opo(inputs: AdvantageInputs):
    weights = inputs.lengths / inputs.lengths.sum(dim=1, keepdim=True)
    return inputs.rewards - (weights * inputs.rewards).sum(dim=1, keepdim=True)
def term(inputs: AdvantageInputs): return inputs.rewards + inputs.weights["short"] * inputs.terms["short"]
def needing(inputs: AdvantageInputs, *, tau: float): return inputs.rewards * tau
def means(inputs: AdvantageInputs): return inputs.rewards.mean(dim=1)
def raising(inputs: AdvantageInputs): raise KeyError("no")
def dividing(inputs: AdvantageInputs): return inputs.rewards / inputs.rewards.std(dim=1, keepdim=True)
def nothing(): ...
"""


def config_of(name: str, **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=f"{MODULE}{name}" if name.startswith(":") else name, **changes)


def test_what_fits_is_accepted() -> None:
    for name in (":median", *ADVANTAGES.keys() - {"pass_at_k"}):
        check_algorithm(config_of(name))
    alone = {"samples_per_prompt": 1, "prompts_per_step": 4}
    check_algorithm(config_of(":median", advantage_options={"factor": 2}, **alone))
    check_algorithm(config_of(":median", advantage_scale="batch"))
    check_algorithm(config_of(":parts", dynamic_sampling_tries=1, advantage_scale="whiten_tokens"))
    check_algorithm(config_of("pass_at_k", advantage_options={"k": 7, "threshold": 0.2}))
    check_algorithm(config_of("gdpo", advantage_options={"format_weight": 0.1}))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_module_4711:f", {}, r"^algorithm\.advantage: there is no module 'no_module_4711' in "),
        (":none", {}, r"algorithm\.advantage: 'my_advantages_4711' has no function 'none'"),
        (":nothing", {}, r"algorithm\.advantage: my_advantages_4711:nothing must take \(inputs\)"),
        (":needing", {}, r"needing needs tau; give algorithm\.advantage_options: \{tau: \.\.\.\}"),
        (":median", {"factr": 2}, r"median has no argument 'factr'; it takes factor"),
        (":median", {"eps": 1.0}, r"eps is a field of its own; set algorithm\.advantage_eps"),
        (":means", {}, r"means fails on a small batch: .* returned shape \(1,\) for rewards of shape \(1, 8\)"),
        (":raising", {}, r"raising fails on a small batch: KeyError: 'no'"),
        (":dividing", {}, r"dividing returned \[nan, .*\] for the rewards \[0\.0, "),
        ("pass_at_k", {}, r"pass_at_k needs k; give algorithm\.advantage_options: \{k: \.\.\.\}"),
        ("pass_at_k", {"k": 0}, r"pass_at_k has k=0: input should be greater than or equal to 1"),
        ("pass_at_k", {"k": 8}, r"k is 8 and a group has 8 responses .*give at most 7"),
        ("mean", {"k": 2}, r"algorithm\.advantage: mean has no argument 'k'; it takes none"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm(config_of(name, advantage_options=options))


def test_rewards_parts_and_options_reach_the_function() -> None:
    """Ungraded responses are left out; the median of 0, 1 and 3 is 1."""
    rewards, is_graded = np.array([0, 7, 1, 3], np.float32), np.array([True, False, True, True])
    config = config_of(":median", advantage_options={"factor": 2.0}, advantage_eps=1.0)
    found = advantages_of(rewards, np.ones(4, int), is_graded, config, max_tokens=8)
    assert found.tolist() == [-1, 0, 0, 2]
    assert (advantages_of(rewards, np.ones(4, int), is_graded.astype(int), config, max_tokens=8) == found).all()
    formats, answers = np.array([1, 1, 0, 1]), np.array([0, 1, 1, 1])
    parts = advantages_of(rewards, np.ones(4, int), is_graded, config_of(":parts"), 8, formats, answers)
    assert parts.tolist() == [10, 0, 101, 113]


@pytest.mark.parametrize(("name", "expected"), [("median", [-1, 0, 1]), ("term", [-1, 10, 1])])
def test_a_kl_in_the_reward_is_compared_by_it(name: str, expected: list[float], tiny_config: Config) -> None:
    """A function has the terms before the run, when it is tried, and in the Learner, as in the Scorer."""
    kl = {"reference": "initial", "coefficient": 1.0, "placement": "reward"}
    algorithm = {"advantage": f"{MODULE}:{name}", "kl": kl, "advantage_eps": 1e-9}
    reward = [{"reward": "brevity", "name": "short", "weight": 10.0}, {"reward": "format"}]
    config = changed(tiny_config, algorithm=algorithm, task={"reward": reward})
    _check_algorithm(config)
    completions = [make_completion([1], [logprob]) for logprob in (-1.0, -2.0, -3.0)]
    group = make_group(make_item(0), completions, [0, 0, 0], [0, 0, 0])
    groups = [replace(group, terms={"short": np.float32([0, 1, 0])})]
    sequences = sequences_of(groups)
    for s in sequences:
        object.__setattr__(s, "reference_logprobs", np.array([-2.0]))
    found, _ = with_batch_advantages(groups, sequences, config)  # KL 1, 0 and -1
    assert [s.advantage for s in found] == pytest.approx(expected)


def test_lengths_reach_an_advantage_of_responses_and_of_episodes() -> None:
    """OPO's baseline of rewards 1, 0, 1 and lengths 1, 2, 5 is 6 / 8; without the ungraded third, 1 / 3."""
    rewards, lengths = np.float32([1, 0, 1]), np.array([1, 2, 5])
    found = advantages_of(rewards, lengths, np.ones(3, bool), config_of(":opo"), max_tokens=8)
    assert found.tolist() == [0.25, -0.75, 0.25]
    found = advantages_of(rewards, lengths, np.array([True, True, False]), config_of(":opo"), max_tokens=8)
    assert found.tolist() == pytest.approx([2 / 3, -1 / 3, 0])
    turns = [([1, 2], [5]), ([1, 2, 5, 6], [7, 8])]
    episodes = [replace(make_episode(turns[:n]), reward=float(n == 1)) for n in (1, 2)]  # of 1 and 3 tokens
    assert verdict_on(episodes, config_of(":opo"), 1.0).advantages.tolist() == [0.75, -0.25]


@pytest.mark.slow
def test_the_audit_runs_it_only_if_told_to(run: RunDirectory, model_cache: None) -> None:
    changes = ["algorithm.num_steps=2", f"algorithm.advantage={MODULE}:median"]
    config = load_config(ROOT / QUICKSTART, [*SMALL, *changes, "algorithm.advantage_options={factor: 3}"])
    train(config, run.path)
    trusted = audit(run, run_reward_code=True)
    assert (trusted.problems, trusted.notes) == ([], [])
    report = audit(run)
    assert report.problems == []
    assert report.notes == [
        f"advantages are not checked, because {MODULE}:median is code that the run's configuration names; if "
        "you trust it, audit with --run-reward-code"
    ]
