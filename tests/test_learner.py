"""The Learner without Ray: its gradient against the published formulas in plain loops, and its guards."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import make_completion, make_group, make_item, plain_logprobs
from transformers import AutoModelForCausalLM

from grpo_ray.actors.learner import Learner
from grpo_ray.actors.staleness import StaleBatchError
from grpo_ray.config import Config
from grpo_ray.engines.snapshot import as_tensor, unpack_weights
from grpo_ray.types import ScoredGroup, TrainBatch, WeightSnapshot

ENDS = (0, 17)
LOSSES = ("no_baseline", "reinforce_with_baseline", "grpo_clip")
AGGREGATIONS = ("sequence_mean", "token_mean", "constant")


@pytest.fixture
def make_learner(tiny_config: Config, tiny_model: Callable[..., Path]) -> Callable[..., Learner]:
    """`make_learner(tied=True, learner={...}, algorithm={...}, ...)`: the tiny configuration, changed."""

    def make(tied: bool = True, **changes: dict[str, Any]) -> Learner:
        data = tiny_config.model_dump()
        for section, fields in changes.items():
            data[section] |= fields
        return Learner(str(tiny_model(tied)), Config.model_validate(data), ENDS)

    return make


def make_batch(learner: Learner, seed: int = 0, noise: float = 0.3, versions: int = 0) -> list[ScoredGroup]:
    """4 groups of 3 of many shapes; behaviour logprobs are the Learner's own plus noise.

    Group 1 has no advantages (all rewards 1) and group 3 neither advantages nor rewards.
    """
    rng = np.random.default_rng(seed)
    all_rewards = [[1, 0, 0], [1, 1, 1], [0, 1, 1], [0, 0, 0]]
    all_advantages = [[1.2, -0.6, -0.6], [0, 0, 0], [-1.1, 0.5, 0.6], [0, 0, 0]]
    groups = []
    for group_id, (rewards, advantages) in enumerate(zip(all_rewards, all_advantages, strict=True)):
        prompt = rng.integers(20, 280, rng.integers(1, 9)).tolist()
        completions = []
        for _ in rewards:
            response = rng.integers(20, 280, rng.integers(1, 13)).tolist()
            with torch.no_grad():
                own = _own_logprobs(learner, prompt, response).numpy()
            behaviour = own + rng.normal(0, noise, len(response))
            completions.append(make_completion(response, behaviour.tolist(), versions))
        groups.append(make_group(make_item(group_id, prompt), completions, rewards, advantages))
    return groups


def _own_logprobs(learner: Learner, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    sampling = learner._config.sampling
    return plain_logprobs(learner.model, prompt, response, sampling.temperature, sampling.min_tokens, ENDS)


def gradient(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten().clone() for parameter in learner.model.parameters()])


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in learner.model.parameters()])


def relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


# ---- the gradient ----


def reference_gradient(
    learner: Learner, groups: Sequence[ScoredGroup], loss: str, aggregation: str, max_tokens: int
) -> tuple[float, torch.Tensor]:
    """Loss and gradient of a batch from the formulas, one sequence and one token at a time.

    no_baseline: -R log pi; reinforce_with_baseline: -A log pi; grpo_clip: -min(r A, clip(r, 0.8, 1.2) A)
    with r = pi / pi_old (DeepSeekMath, Eq. 3). sequence_mean: 1/N sum_i 1/|o_i| sum_t; token_mean:
    1/sum_i |o_i| sum_i sum_t; constant: 1/(N max_tokens) sum_i sum_t. grpo_clip leaves tokens without a
    finite logprob out of |o_i|.
    """
    per_sequence: list[list[torch.Tensor]] = []
    for group in groups:
        for c, reward, advantage in zip(
            group.rollout.completions, group.rewards, group.advantages, strict=True
        ):
            logprobs = _own_logprobs(learner, group.rollout.item.prompt_token_ids, c.token_ids.tolist())
            losses = []
            for new, old in zip(logprobs, c.logprobs.tolist(), strict=True):
                if loss == "no_baseline":
                    losses.append(-float(reward) * new)
                elif loss == "reinforce_with_baseline":
                    losses.append(-float(advantage) * new)
                elif np.isfinite(old):
                    ratio = torch.exp(new - old)
                    bounded = min(max(ratio, 0.8 * torch.ones(())), 1.2 * torch.ones(()))
                    losses.append(-min(ratio * float(advantage), bounded * float(advantage)))
            per_sequence.append(losses)
    count = len(per_sequence)
    if aggregation == "sequence_mean":
        total = sum(sum(losses) / len(losses) for losses in per_sequence) / count
    elif aggregation == "token_mean":
        total = sum(sum(losses) for losses in per_sequence) / sum(len(losses) for losses in per_sequence)
    else:
        total = sum(sum(losses) for losses in per_sequence) / (count * max_tokens)
    gradients = torch.autograd.grad(total, list(learner.model.parameters()))
    return total.item(), torch.cat([g.flatten() for g in gradients])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_is_the_published_formulas(
    make_learner: Callable[..., Learner], loss: str, aggregation: str
) -> None:
    learner = make_learner(algorithm={"loss": loss, "aggregation": aggregation}, sampling={"temperature": 0.7})
    groups = make_batch(learner)
    expected_loss, expected = reference_gradient(learner, groups, loss, aggregation, max_tokens=16)
    sums = learner.accumulate_gradient(groups)
    # Groups without signal are not computed, but add nothing to the reference's loss either: their
    # weights are 0.
    assert sums["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert relative_difference(gradient(learner), expected) < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_does_not_depend_on_micro_batches(
    make_learner: Callable[..., Learner], loss: str, aggregation: str
) -> None:
    gradients, metrics = [], []
    for tokens in (1, 40, 100_000):
        learner = make_learner(
            algorithm={"loss": loss, "aggregation": aggregation}, learner={"micro_batch_tokens": tokens}
        )
        metrics.append(dict(learner.accumulate_gradient(make_batch(learner))))
        gradients.append(gradient(learner))
    assert gradients[0].abs().max() > 1e-3
    assert relative_difference(gradients[1], gradients[0]) < 1e-6
    assert relative_difference(gradients[2], gradients[0]) < 1e-6
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)
    assert metrics[2] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)


def test_gradient_checkpointing_changes_nothing(make_learner: Callable[..., Learner]) -> None:
    plain, recomputed = make_learner(), make_learner(learner={"gradient_checkpointing": True})
    for learner in (plain, recomputed):
        learner.accumulate_gradient(make_batch(learner))
    assert relative_difference(gradient(recomputed), gradient(plain)) < 1e-6


def test_bfloat16_gradient_is_close(make_learner: Callable[..., Learner]) -> None:
    full, half = make_learner(), make_learner(model={"dtype": "bfloat16"})
    groups = make_batch(full, noise=0.0)
    for learner in (full, half):
        learner.accumulate_gradient(groups)
    assert gradient(half).dtype is torch.float32
    assert 1e-4 < relative_difference(gradient(half), gradient(full)) < 0.1


@pytest.mark.parametrize(("aggregation", "share"), [("sequence_mean", 0.5), ("constant", 0.5)])
def test_groups_without_signal_count_and_change_nothing_else(
    make_learner: Callable[..., Learner], aggregation: str, share: float
) -> None:
    learner = make_learner(algorithm={"aggregation": aggregation})
    groups = make_batch(learner)
    learner.accumulate_gradient([groups[0], groups[2]])
    alone = gradient(learner)
    learner.accumulate_gradient(groups)  # groups 1 and 3 have no advantages: twice as many sequences
    assert relative_difference(gradient(learner), share * alone) < 1e-6


def test_batch_without_any_signal_leaves_the_weights(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(learner={"learning_rate": 1e-2})
    before = weights(learner)
    groups = make_batch(learner)
    report = learner.train_step(TrainBatch((groups[1], groups[3])))
    assert torch.equal(weights(learner), before)
    assert report.version == learner.version == 1
    assert report.metrics["loss/policy"] == report.metrics["optim/grad_norm"] == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_without_a_finite_logprob(
    make_learner: Callable[..., Learner], loss: str, aggregation: str
) -> None:
    """GRPO-Clip drops them from sum and count; the other losses do not use behaviour logprobs."""
    learner = make_learner(algorithm={"loss": loss, "aggregation": aggregation})
    groups = make_batch(learner)
    longest = max(groups[0].rollout.completions, key=lambda c: len(c.token_ids))
    longest.logprobs[1] = -np.inf
    groups[2].rollout.completions[0].logprobs[:-1] = np.nan
    expected_loss, expected = reference_gradient(learner, groups, loss, aggregation, max_tokens=16)
    sums = learner.accumulate_gradient(groups)
    assert sums["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert relative_difference(gradient(learner), expected) < 1e-5


# ---- the step ----


def test_learning_rate_ramps_up(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(learner={"learning_rate": 4e-2, "warmup_steps": 4})
    rates, before = [], weights(learner)
    for _ in range(6):
        report = learner.train_step(TrainBatch(tuple(make_batch(learner, versions=learner.version))))
        rates.append(report.metrics["optim/lr"])
        if learner.version == 1:
            # Adam's first step moves each weight by the rate, whatever its gradient.
            assert (weights(learner) - before).abs().max().item() == pytest.approx(1e-2, rel=1e-3)
    assert rates == pytest.approx([1e-2, 2e-2, 3e-2, 4e-2, 4e-2, 4e-2])
    assert learner.version == 6


def test_step_is_adamw_on_the_clipped_gradient(make_learner: Callable[..., Learner]) -> None:
    options = {"learning_rate": 1e-2, "max_grad_norm": 0.01, "weight_decay": 0.1, "adam_eps": 1e-3}
    learner = make_learner(learner=options)
    groups = make_batch(learner)
    learner.accumulate_gradient(groups)
    unclipped, before = gradient(learner), weights(learner)
    norm = unclipped.norm().item()
    assert norm > 0.1
    report = learner.train_step(TrainBatch(tuple(groups)))
    assert report.metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    g = unclipped * 0.01 / norm
    # AdamW's first step: both moments, bias-corrected, are g and g**2.
    expected = before * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-3)
    torch.testing.assert_close(weights(learner), expected, atol=1e-6, rtol=1e-5)


def test_small_gradient_is_not_scaled(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(learner={"max_grad_norm": 1e3})
    groups = make_batch(learner)
    learner.accumulate_gradient(groups)
    unclipped = gradient(learner)
    learner.train_step(TrainBatch(tuple(groups)))
    assert torch.equal(gradient(learner), unclipped)


def test_second_batch_does_not_carry_the_first_ones_gradient(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner()
    learner.accumulate_gradient(make_batch(learner, seed=1))
    learner.accumulate_gradient(make_batch(learner, seed=2))
    fresh = make_learner()
    fresh.accumulate_gradient(make_batch(fresh, seed=2))
    assert torch.equal(gradient(learner), gradient(fresh))


def test_steps_raise_the_reward_weighted_likelihood(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(learner={"learning_rate": 1e-3})
    groups = make_batch(learner)

    def objective() -> float:
        with torch.no_grad():
            return sum(
                float(advantage) * _own_logprobs(learner, g.rollout.item.prompt_token_ids, c.token_ids).mean()
                for g in groups
                for c, advantage in zip(g.rollout.completions, g.advantages, strict=True)
            )

    before = objective()
    learner.train_step(TrainBatch(tuple(groups)))
    assert objective() > before + 0.1


# ---- how old a token may be ----


def at_version(learner: Learner, version: int) -> Learner:
    learner.version = version
    return learner


def with_versions(groups: Sequence[ScoredGroup], versions: dict[tuple[int, int], Sequence[int]]) -> TrainBatch:
    """The groups with the token versions of completion (group, sample) replaced."""
    changed = []
    for i, group in enumerate(groups):
        completions = tuple(
            replace(c, versions=np.array(versions.get((i, j), c.versions), dtype=np.int32))
            for j, c in enumerate(group.rollout.completions)
        )
        changed.append(replace(group, rollout=replace(group.rollout, completions=completions)))
    return TrainBatch(tuple(changed))


@pytest.mark.parametrize(("max_lag", "too_old"), [(0, 4), (1, 3), (3, 1)])
def test_one_token_too_old_refuses_the_batch_and_changes_nothing(
    make_learner: Callable[..., Learner], max_lag: int, too_old: int
) -> None:
    changes = {"weight_sync": {"max_lag": max_lag}, "learner": {"learning_rate": 1e-2}}
    learner = at_version(make_learner(**changes), 5)
    groups = make_batch(learner, versions=5)
    length = len(groups[1].rollout.completions[2].token_ids)  # in a group without signal, even
    before = weights(learner)
    stale = with_versions(groups, {(1, 2): [5] * (length - 1) + [too_old]})
    with pytest.raises(StaleBatchError, match=f"version {too_old} reached the Learner at version 5.*{max_lag}"):
        learner.train_step(stale)
    assert torch.equal(weights(learner), before)
    assert learner.version == 5
    # What follows is the step that a Learner which never saw the batch takes.
    untouched = at_version(make_learner(**changes), 5)
    fresh_enough = with_versions(groups, {(1, 2): [5] * (length - 1) + [too_old + 1]})
    for each in (learner, untouched):
        assert each.train_step(fresh_enough).version == 6
    assert torch.equal(weights(learner), weights(untouched))


def test_lag_by_hand(make_learner: Callable[..., Learner]) -> None:
    learner = at_version(make_learner(weight_sync={"max_lag": 3}), 7)
    completions = [make_completion([21, 22, 23], versions=[5, 6, 7]), make_completion([24], versions=7)]
    group = make_group(make_item(), completions, [1, 0], [0.7, -0.7])
    metrics = learner.train_step(TrainBatch((group,))).metrics
    assert metrics["lag/mean"] == pytest.approx((2 + 1 + 0 + 0) / 4)
    assert metrics["lag/max"] == 2.0


# ---- metrics ----


def test_own_logprobs_have_no_mismatch(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner()
    metrics = learner.train_step(TrainBatch(tuple(make_batch(learner, noise=0.0)))).metrics
    assert 0.0 <= metrics["mismatch/kl"] < 1e-10
    assert metrics["mismatch/logprob_diff/max"] < 1e-5
    assert metrics["loss/clip_frac"] == 0.0


def test_mismatch_and_clipping_by_hand(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner()
    response = [21, 22, 23, 24]
    with torch.no_grad():
        own = _own_logprobs(learner, [1, 2], response).numpy()
    # Learner minus behaviour: ratios 1, e^0.5, e^-0.5, 1. Clipped where the ratio is above 1.2 and A > 0,
    # or below 0.8 and A < 0.
    log_ratio = np.array([0.0, 0.5, -0.5, 0.0])
    completion = make_completion(response, (own - log_ratio).tolist())
    group = make_group(make_item(0, [1, 2]), [completion, completion], [1, 0], [1.0, -1.0])
    metrics = learner.train_step(TrainBatch((group,))).metrics
    assert metrics["loss/clip_frac"] == pytest.approx(2 / 8)
    k3 = np.exp(log_ratio) - 1 - log_ratio
    assert metrics["mismatch/kl"] == pytest.approx(k3.mean(), rel=1e-4)
    assert metrics["mismatch/logprob_diff/max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["throughput/trained_tokens"] == 8


def test_entropy_is_the_mean_over_trained_tokens(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(sampling={"temperature": 0.7})
    groups = make_batch(learner)
    entropies = []
    for group in (groups[0], groups[2]):  # the others have no signal
        prompt = group.rollout.item.prompt_token_ids
        for c in group.rollout.completions:
            ids = torch.tensor([[*prompt, *c.token_ids.tolist()]])
            with torch.no_grad():
                rows = learner.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.7
            rows[:2, list(ENDS)] = -torch.inf  # min_tokens is 2
            entropies += torch.distributions.Categorical(logits=rows).entropy().tolist()
    metrics = learner.train_step(TrainBatch(tuple(groups))).metrics
    assert metrics["policy/entropy"] == pytest.approx(np.mean(entropies), rel=1e-5)


# ---- weights out ----


def unpacked(snapshot: WeightSnapshot) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in unpack_weights(snapshot.specs, as_tensor(snapshot.data))}


@pytest.mark.parametrize("tied", [True, False])
def test_snapshot_holds_every_weight_exactly(make_learner: Callable[..., Learner], tied: bool) -> None:
    learner = at_version(make_learner(tied), 3)
    snapshot = learner.snapshot()
    tensors = unpacked(snapshot)
    assert snapshot.version == 3
    assert ("lm_head.weight" in tensors) == (not tied)
    expected = dict(learner.model.state_dict())
    if tied:
        del expected["lm_head.weight"]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert all(spec.offset_bytes % 64 == 0 for spec in snapshot.specs)


def test_bfloat16_snapshot_is_the_cast(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(model={"dtype": "bfloat16"})
    snapshot = learner.snapshot()
    assert {spec.dtype for spec in snapshot.specs} == {"bfloat16"}
    for name, tensor in unpacked(snapshot).items():
        assert torch.equal(tensor, learner.model.get_parameter(name).to(torch.bfloat16))
        assert learner.model.get_parameter(name).dtype is torch.float32  # master weights stay


def test_next_step_does_not_change_a_snapshot(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner(learner={"learning_rate": 1e-2})
    snapshot = learner.snapshot()
    before = snapshot.data.copy()
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    assert np.array_equal(snapshot.data, before)
    assert not np.array_equal(learner.snapshot().data, before)


@pytest.mark.parametrize("tied", [True, False])
def test_save_can_be_loaded(make_learner: Callable[..., Learner], tmp_path: Path, tied: bool) -> None:
    learner = make_learner(tied, learner={"learning_rate": 1e-2})
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    folder = learner.save(tmp_path / "step-000001")
    assert folder == tmp_path / "step-000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    ids = torch.tensor([[5, 6, 7, 8]])
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids, use_cache=False).logits, learner.model(ids, use_cache=False).logits)
    assert (folder / "tokenizer.json").exists()


def test_a_gradient_that_is_not_finite_leaves_the_weights(make_learner: Callable[..., Learner]) -> None:
    learner = make_learner()
    batch = TrainBatch(tuple(make_batch(learner)))
    with torch.no_grad():
        next(learner.model.parameters())[:] = torch.nan
    other = weights(learner)[-10:].clone()
    with pytest.raises(FloatingPointError, match="not finite at version 0"):
        learner.train_step(batch)
    assert learner.version == 0
    assert torch.equal(weights(learner)[-10:], other)
