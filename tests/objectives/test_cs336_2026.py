"""The handout's functions of spring 2026: by hand, and one gradient however a batch is split."""

import math
from itertools import product

import pytest
import torch
from test_logprobs import LetterTokenizer, tiny_llama

from examples.course.cs336_2026 import (
    aggregate_loss_across_microbatch,
    compute_group_normalized_rewards,
    compute_policy_gradient_loss,
    compute_rollout_rewards,
    grpo_train_step,
)
from grpo_ray.objectives import masked_mean, token_log_probs, tokenize_prompt_and_output

PROMPTS = ["ab", "ab", "abc", "abc", "d", "d"]
RESPONSES = ["c", "de", "", "fghi", "abc", "b"]  # the third has no tokens
TRUTHS = ["c", "c", "f", "f", "b", "b"]
TOKENIZER = LetterTokenizer()
METHODS = ("none", "noclip", "grpo", "gspo")
NORMALIZATIONS = (("sequence", None), ("constant", 24))


def first_letter_reward(response, ground_truth):
    answer = float(response[:1] == ground_truth)
    reward = answer + 0.1 * len(response)
    return {"reward": reward, "format_reward": float(response != ""), "answer_reward": answer}


# ---- rewards and advantages ----


def test_rewards_and_their_metrics_by_hand():
    rewards, metadata = compute_rollout_rewards(first_letter_reward, ["c", "de", "", "cc"], list("cccc"))
    torch.testing.assert_close(rewards, torch.tensor([1.1, 0.2, 0.0, 1.2]))
    std = math.sqrt((0.475**2 + 0.425**2 + 0.625**2 + 0.575**2) / 3)
    expected = {"reward/mean": 0.625, "reward/std": std, "reward/min": 0.0, "reward/max": 1.2}
    assert metadata == pytest.approx(expected | {"reward/format": 0.75, "reward/answer": 0.5})


@pytest.mark.parametrize(
    ("baseline", "normalizer", "expected"),
    [  # [1, 0, 0]: mean 1/3, sample std sqrt(1/3); [4, 2, 0]: mean 2, sample std 2
        ("mean", "std", [2 / 3 * 3**0.5, -1 / 3 * 3**0.5, -1 / 3 * 3**0.5, 1, 0, -1]),
        ("mean", "none", [2 / 3, -1 / 3, -1 / 3, 2, 0, -2]),
        ("mean", "mean", [2, -1, -1, 1, 0, -1]),
        ("none", "none", [1, 0, 0, 4, 2, 0]),
        ("none", "std", [3**0.5, 0, 0, 2, 1, 0]),
        ("none", "mean", [3, 0, 0, 2, 1, 0]),
    ],
)
def test_advantages_by_hand(baseline, normalizer, expected):
    rewards = torch.tensor([1.0, 0, 0, 4, 2, 0])
    advantages, metadata = compute_group_normalized_rewards(rewards, 3, baseline, 0.0, normalizer)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32))
    assert metadata["advantage/max"] == pytest.approx(max(expected))
    assert metadata["advantage/mean"] == pytest.approx(sum(expected) / 6, abs=1e-6)


def test_eps_is_added_to_either_divisor_and_not_to_none():
    rewards = torch.tensor([1.0, 0.0])
    for normalizer, divisor in (("std", 0.5**0.5 + 0.5), ("mean", 0.5 + 0.5), ("none", 1.0)):
        advantages, _ = compute_group_normalized_rewards(rewards, 2, "mean", 0.5, normalizer)
        assert advantages.tolist() == pytest.approx([0.5 / divisor, -0.5 / divisor])


def test_equal_rewards_have_no_advantage_with_a_baseline_and_the_defaults_are_those_of_grpo():
    for normalizer, reward in product(("std", "mean", "none"), (0.0, 0.1, 1 / 3)):
        advantages, _ = compute_group_normalized_rewards(torch.full((6,), reward), 3, "mean", 0.0, normalizer)
        assert advantages.tolist() == [0.0] * 6
    rewards = torch.tensor([1.0, 0.0, 0.0, 5.0])
    expected, _ = compute_group_normalized_rewards(rewards, 4, "mean", 1e-6, "std")
    assert torch.equal(compute_group_normalized_rewards(rewards, 4)[0], expected)


def log_probs(seed=0, rows=4, columns=5):
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    policy = old + 0.4 * torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return policy, old


ADVANTAGES = torch.tensor([1.5, -0.5, 2.0, -1.0], dtype=torch.float64)
MASK = torch.arange(5) < torch.tensor([[5], [3], [0], [1]])


def test_without_a_mask_every_token_counts():
    policy, old = torch.zeros(1, 4), torch.tensor([[0.0, 1.0, -1.0, -2.0]])
    loss, details = compute_policy_gradient_loss(torch.ones(1), policy, "grpo", old, 0.2)
    assert loss.tolist()[0] == pytest.approx([-1.0, -math.exp(-1), -1.2, -1.2])
    assert details["clip_fraction"].item() == 0.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("normalization", "constant"), NORMALIZATIONS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_nan_outside_the_mask_changes_neither_loss_nor_gradient(method, normalization, constant):
    results = []
    for padding in (-1.0, math.nan):
        policy, old = (tensor.masked_fill(~MASK, padding) for tensor in log_probs())
        policy.requires_grad_()
        per_token, details = compute_policy_gradient_loss(ADVANTAGES, policy, method, old, 0.2, MASK)
        loss = aggregate_loss_across_microbatch(per_token, MASK, normalization, constant)
        with torch.autograd.detect_anomaly():  # raises on any NaN in an intermediate gradient
            loss.backward()
        results.append((loss, policy.grad, details.get("clip_fraction", torch.zeros(()))))
    for clean, poisoned in zip(*results, strict=True):
        assert poisoned.isfinite().all()
        assert torch.equal(clean, poisoned)
    assert results[0][1].any()
    assert not results[0][1][~MASK].any()


def whole_batch(model):
    """Return the tokenized batch and old log-probabilities that are a little off, NaN outside the responses."""
    batch = tokenize_prompt_and_output(PROMPTS, RESPONSES, TOKENIZER)
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    current = logits.log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    noise = torch.randn(current.shape, generator=torch.Generator().manual_seed(1))
    return batch, (current + 0.3 * noise).masked_fill(~batch["response_mask"], math.nan)


def train(num_steps, method="none", normalization=("sequence", None), max_grad_norm=None, **arguments):
    """Return the step's loss and metadata, and the change of the weights under SGD with rate 1."""
    model = tiny_llama()
    _, old = whole_batch(model)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    names = ("loss_normalization", "normalization_constant")
    loss, metadata = grpo_train_step(
        model, TOKENIZER, torch.optim.SGD(model.parameters(), lr=1.0), num_steps, max_grad_norm,
        first_letter_reward, PROMPTS, RESPONSES, TRUTHS, 2,
        importance_reweighting_method=method, old_log_probs=old, cliprange=0.2,
        **dict(zip(names, normalization, strict=True)), **arguments,
    )  # fmt: skip
    assert all(parameter.grad is None for parameter in model.parameters())
    return loss, metadata, torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before


@pytest.mark.slow
@pytest.mark.parametrize(("method", "normalization"), list(product(METHODS, NORMALIZATIONS)))
def test_the_step_against_autograd_of_the_whole_batch_row_by_row(method, normalization):
    """Six rows, one without response tokens, in any number of parts."""
    model = tiny_llama()
    batch, old = whole_batch(model)
    rewards = [first_letter_reward(*pair)["reward"] for pair in zip(RESPONSES, TRUTHS, strict=True)]
    total, num_clipped = torch.zeros(()), 0
    for row, response in enumerate(RESPONSES):
        if not response:
            continue
        group = torch.tensor(rewards[row // 2 * 2 : row // 2 * 2 + 2])
        advantage = (rewards[row] - group.mean()) / (group.std() + 1e-6)
        mask = batch["response_mask"][row]
        logits = model(batch["input_ids"][row][None]).logits[0]
        policy = logits.log_softmax(-1).gather(-1, batch["labels"][row][:, None])[:, 0][mask]
        log_ratio = policy - old[row][mask]
        log_ratio = log_ratio.mean().expand(len(policy)) if method == "gspo" else log_ratio
        ratio = log_ratio.exp()
        unclipped, clipped = advantage * ratio, advantage * ratio.clamp(0.8, 1.2)
        smaller = torch.minimum(unclipped, clipped)
        objective = {"none": advantage * policy, "noclip": unclipped}.get(method, smaller)
        num_clipped += (clipped < unclipped).sum().item() if method in ("grpo", "gspo") else 0
        total = total - (objective.mean() / 6 if normalization[0] == "sequence" else objective.sum() / 24)
    total.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert (num_clipped > 0) == (method in ("grpo", "gspo"))
    _, whole, _ = train(1, method, normalization)
    assert whole["clip_fraction"].item() == pytest.approx(num_clipped / batch["response_mask"].sum().item())
    for num_steps in (1, 2, 4, 5, 6, 9):  # of which 4 and 5 do not divide the rows
        loss, metadata, change = train(num_steps, method, normalization)
        assert loss.item() == pytest.approx(total.item(), rel=1e-5, abs=1e-6)
        assert ((change + gradient).norm() / gradient.norm()).item() < 1e-5
        assert metadata["grad_norm"].item() == pytest.approx(gradient.norm().item(), rel=1e-5)
        for name in ("token_entropy", "clip_fraction"):
            torch.testing.assert_close(metadata[name], whole[name], rtol=1e-5, atol=1e-6)


def test_clipping_by_norm_and_what_the_metadata_holds():
    _, metadata, change = train(2, max_grad_norm=0.01)
    assert metadata["grad_norm"] > 0.1  # before clipping
    assert change.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert metadata["reward/answer"] == pytest.approx(3 / 6)
    assert metadata["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    for options, mean, largest in (({"baseline": "none"}, 4.1 / 6, 1.4), ({}, 0.0, 0.7)):
        _, unscaled, _ = train(2, advantage_normalizer="none", **options)
        assert unscaled["advantage/mean"] == pytest.approx(mean, abs=1e-6)
        assert unscaled["advantage/max"] == pytest.approx(largest)
    model = tiny_llama()
    batch, _ = whole_batch(model)
    probabilities = model(batch["input_ids"]).logits.softmax(-1)[batch["response_mask"]]
    entropy = torch.distributions.Categorical(probs=probabilities).entropy().mean()
    assert metadata["token_entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)


def test_gradients_from_before_are_discarded():
    model = tiny_llama()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 100.0)
    _, metadata = grpo_train_step(
        model, TOKENIZER, torch.optim.SGD(model.parameters(), lr=1.0), 1, None,
        first_letter_reward, PROMPTS, RESPONSES, TRUTHS, 2,
    )  # fmt: skip
    assert metadata["grad_norm"].item() == pytest.approx(train(1)[1]["grad_norm"].item())


# ---- bad arguments ----


def test_bad_arguments_are_refused_by_name():
    policy, old = log_probs()
    rewards = torch.ones(4)
    normalized, loss_of = compute_group_normalized_rewards, compute_policy_gradient_loss
    cases = [
        ("2 rollout_responses and 1 repeated_ground_truths", compute_rollout_rewards, (len, ["a", "b"], ["a"])),
        ("0 rollout_responses", compute_rollout_rewards, (len, [], [])),
        ("reward_fn returned 1, not a dict", compute_rollout_rewards, (lambda *_: 1, ["a"], ["a"])),
        ("group_size=3", normalized, (rewards, 3)),
        ("group_size=0", normalized, (rewards, 0)),
        ("raw_rewards", normalized, (rewards[:, None], 2)),
        ("raw_rewards", normalized, (rewards[:0], 2)),
        ("'std'.*group_size of at least 2", normalized, (rewards, 1)),
        ("'mean'.*at least 0", normalized, (rewards - 1.1, 2, "mean", 1e-6, "mean")),
        ("unknown baseline 'std'; allowed: mean, none", normalized, (rewards, 2, "std")),
        ("raw_rewards are torch.int64", normalized, (rewards.long(), 2)),
        ("unknown advantage_normalizer 'max'", normalized, (rewards, 2, "mean", 0, "max")),
        ("unknown importance_reweighting_method 'clip'", loss_of, (rewards, policy, "clip")),
        ("old_log_probs has shape", loss_of, (rewards, policy, "grpo", old[:, :1], 0.2, MASK)),
        ("labels .* do not fit logits", token_log_probs, (torch.zeros(2, 3, 7), torch.zeros(1, 3).long())),
        ("the mask has shape", masked_mean, (policy, MASK[0])),
        ("'noclip' needs old_log_probs", loss_of, (rewards, policy, "noclip")),
        ("'grpo' needs cliprange", loss_of, (rewards, policy, "grpo", old)),
        ("needs response_mask", loss_of, (rewards, policy, "gspo", old, 0.2)),
        ("shape", loss_of, (rewards, policy, "grpo", old[:, :4], 0.2)),
        (r"\[batch, 1\]", loss_of, (rewards[:3], policy)),
        ("mask has shape", aggregate_loss_across_microbatch, (policy, MASK[:, :1])),
        ("unknown loss_normalization 'token'", aggregate_loss_across_microbatch, (policy, MASK, "token")),
        ("normalization_constant", aggregate_loss_across_microbatch, (policy, MASK, "constant")),
        ("normalization_constant", aggregate_loss_across_microbatch, (policy, MASK, "constant", 0)),
    ]
    for message, function, arguments in cases:
        with pytest.raises(ValueError, match=message):
            function(*arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("gradient_accumulation_steps", {"gradient_accumulation_steps": 0}),
        ("'grpo' needs old_log_probs", {"importance_reweighting_method": "grpo"}),
        ("'gspo' needs cliprange", {"importance_reweighting_method": "gspo", "old_log_probs": torch.ones(1)}),
        ("old_log_probs has shape",
         {"importance_reweighting_method": "noclip", "old_log_probs": torch.ones(6, 9)}),
        ("normalization_constant", {"loss_normalization": "constant"}),
        ("6 prompts and 5 outputs", {"rollout_responses": RESPONSES[:5]}),
    ],
)  # fmt: skip
def test_a_step_is_refused_before_anything_is_graded(message, arguments):
    model, graded = tiny_llama(), lambda *_: pytest.fail("graded before the check")
    given = {"gradient_accumulation_steps": 1, "max_grad_norm": None, "reward_fn": graded, "group_size": 2}
    given |= {"repeated_prompts": PROMPTS, "rollout_responses": RESPONSES, "repeated_ground_truths": TRUTHS}
    with pytest.raises(ValueError, match=message):
        grpo_train_step(model, TOKENIZER, torch.optim.SGD(model.parameters()), **given | arguments)
