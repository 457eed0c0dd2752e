"""The gradient at every token: 1 for the plain policy gradient in any aggregation, and what faults change."""

import math
from typing import get_args

import pytest
import torch

from examples.broken import losses
from grpo_ray.config.losses import Aggregation
from grpo_ray.objectives import Objective, RatioInputs, gradient_sums, loss_denominator, policy_gradient_step
from grpo_ray.watch.learner_metrics import add, mean_metrics

BROKEN = "examples.broken.losses"
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([[1.0], [-2.0], [0.0], [0.5]])
LOG_PROBS = -torch.linspace(0.1, 2.0, 16).view(4, 4)
PROMPT_TOKENS = torch.tensor([5, 5, 5, 5])  # two responses each


def metrics(
    objective: Objective,
    splits: list[slice],
    old: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> dict[str, float]:
    """Return the metrics of one update in these micro-batches."""
    num_prompts, max_tokens = 2, 4
    denominator = loss_denominator(objective.aggregation, 4, int(MASK.sum()), max_tokens, num_prompts)
    sums: dict[str, float] = {}
    for split in splits:
        log_probs = LOG_PROBS[split].clone().requires_grad_()
        row_tokens = PROMPT_TOKENS[split] if objective.aggregation == "prompt_mean" else None
        factors = None if weights is None else weights[split]
        loss, counts = policy_gradient_step(
            log_probs, MASK[split], objective=objective, denominator=denominator, advantages=ADVANTAGES[split],
            old_log_probs=(LOG_PROBS if old is None else old)[split], weights=factors, row_tokens=row_tokens,
        )  # fmt: skip
        loss.backward()
        assert log_probs.grad is not None
        counts |= gradient_sums(
            log_probs.grad,
            MASK[split],
            ADVANTAGES[split],
            objective.aggregation,
            denominator,
            row_tokens,
            factors,
        )
        add(sums, {name: float(value) for name, value in counts.items()})
    return mean_metrics(sums)


WHOLE, HALVES = [slice(0, 4)], [slice(0, 2), slice(2, 4)]


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
@pytest.mark.parametrize("loss", ["no_baseline", "reinforce_with_baseline", "grpo_clip", "cispo", "gspo"])
def test_a_right_loss_has_scale_1_and_trains_every_token(aggregation: Aggregation, loss: str) -> None:
    for splits in (WHOLE, HALVES):
        found = metrics(Objective(loss, aggregation), splits)
        assert found["loss/gradient_scale"] == pytest.approx(1)
        assert found["loss/untrained_frac"] == 0


def test_a_normalizer_per_micro_batch_has_the_number_of_micro_batches_as_scale() -> None:
    broken = Objective(f"{BROKEN}:mean_per_micro_batch", "sequence_mean", loss_options={"num_responses": 4})
    assert metrics(broken, WHOLE)["loss/gradient_scale"] == pytest.approx(1)
    assert metrics(broken, HALVES)["loss/gradient_scale"] == pytest.approx(2)


def test_a_mask_that_is_off_by_one_leaves_each_first_token_untrained() -> None:
    found = metrics(Objective(f"{BROKEN}:mask_off_by_one", "token_mean"), WHOLE)
    assert found["loss/untrained_frac"] == pytest.approx(3 / 6)  # of 3 + 2 + 1 tokens with an advantage
    assert found["loss/gradient_scale"] == pytest.approx((2 * 1 + 1 * 2 + 0) / (3 * 1 + 2 * 2 + 0.5))


def test_clipped_tokens_and_those_of_weight_0_are_not_untrained() -> None:
    old = LOG_PROBS.clone()
    old[0, 0] -= math.log(2)  # ratio 2 with a positive advantage: clipped
    found = metrics(Objective("grpo_clip", "token_mean"), WHOLE, old)
    assert found["loss/clip_frac"] == pytest.approx(1 / 6)
    assert found["loss/untrained_frac"] == 0
    assert found["loss/gradient_scale"] == pytest.approx(6.5 / 7.5)
    weights = torch.ones(4, 4)
    weights[1] = 0
    dropped = metrics(Objective("grpo_clip", "token_mean"), WHOLE, weights=weights)
    assert dropped["loss/untrained_frac"] == 0
    assert dropped["loss/gradient_scale"] == pytest.approx(1)


def test_a_stale_cache_keeps_the_first_batch_s_logprobs() -> None:
    stale = losses.StaleOldLogProbs()

    def ratio(old: float) -> float:
        shape = (1, 1)
        inputs = RatioInputs(
            torch.full(shape, -1.0),
            torch.ones(shape),
            torch.ones(shape, dtype=torch.bool),
            torch.full(shape, old),
        )
        return float(stale(inputs)[1]["ratio"])

    assert ratio(-1.0) == pytest.approx(1)
    assert ratio(-2.0) == pytest.approx(1)  # the right one would be e
