"""Masked reductions, aggregations and off-policy weights, by hand and against plain loops."""

import math
from typing import get_args

import pytest
import torch
from slow_objectives import slow_weights

from examples.broken import losses
from grpo_ray.config.algorithm import WEIGHING
from grpo_ray.objectives import (
    CORRECTIONS,
    Aggregation,
    CorrectionInputs,
    Objective,
    RatioInputs,
    aggregate_loss,
    correction_weights,
    loss_denominator,
    masked_mean,
    masked_normalize,
    policy_gradient_step,
)
from grpo_ray.objectives.aggregation import gradient_sums
from grpo_ray.objectives.correction import correction_sums
from grpo_ray.objectives.inputs import arguments_of
from grpo_ray.objectives.kl import effective_sample_fraction, mismatch_sums
from grpo_ray.watch.learner_metrics import add, mean_metrics

AGGREGATIONS = [name for name in get_args(Aggregation) if name != "prompt_mean"]  # that needs row_tokens


def test_masked_reductions_by_hand():
    """The mask is bool or 0/1."""
    tensor = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    assert masked_mean(tensor, mask).item() == pytest.approx(10 / 3)
    assert masked_mean(tensor, mask, dim=1).tolist() == [2.0, 6.0]
    expected = torch.tensor([1.0, torch.nan, 4.5])
    torch.testing.assert_close(masked_mean(tensor, mask, dim=0), expected, equal_nan=True)
    mask = mask.int()
    assert masked_normalize(tensor, mask, constant_normalizer=4.0).item() == 2.5
    assert masked_normalize(tensor, mask, dim=1, constant_normalizer=2.0).tolist() == [2.0, 3.0]
    assert masked_normalize(tensor, mask, dim=0).tolist() == [1.0, 0.0, 9.0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_masked_out_poison_does_not_leak(poison):
    tensor = torch.tensor([[1.0, poison], [3.0, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [True, True]])
    results = [masked_mean(tensor, mask), masked_normalize(tensor, mask)]
    results += [aggregate_loss(tensor, mask, aggregation, 1.0) for aggregation in AGGREGATIONS]
    assert [result.item() for result in results] == [3.0, 9.0, 5.0, 9.0, 9.0, 9.0]
    torch.stack(results).sum().backward()
    # 1/3 + 1 + (1 or 1/2) + 1 + 1 + 1 at the live tokens, exactly 0 at the poisoned one
    torch.testing.assert_close(tensor.grad, torch.tensor([[16 / 3, 0.0], [29 / 6, 29 / 6]]))


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("sequence_mean", (1.5 + 6.0) / 2),
        ("token_mean", (1.0 + 2.0 + 6.0) / 3),
        ("constant", (1.0 + 2.0 + 6.0) / (2 * 4)),
        ("sequence_sum", (1.0 + 2.0 + 6.0) / 2),
    ],
)
def test_aggregation_by_hand(aggregation, expected):
    per_token_loss = torch.tensor([[1.0, 2.0, 9.0], [6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    denominator = loss_denominator(aggregation, num_sequences=2, num_tokens=3, max_tokens=4)
    assert aggregate_loss(per_token_loss, mask, aggregation, denominator).item() == pytest.approx(expected)


def test_bad_arguments_are_refused() -> None:
    one = torch.ones(1, 1)
    for arguments, message in (
        (("token_mean", 0.0), "denominator"),
        (("token_mean", -1.0), "denominator"),
        (("token_mean", math.nan), "denominator"),
        (("mean", 1.0), r"'mean'.*sequence_mean, token_mean, constant"),
        (("prompt_mean", 1.0), "prompt_mean needs row_tokens"),
        (("prompt_mean", 1.0, one), r"must be \[batch\] = \[1\], got \[1, 1\]"),
    ):
        with pytest.raises(ValueError, match=message):
            aggregate_loss(one, one, *arguments)
    with pytest.raises(ValueError, match=r"'mean'.*sequence_mean, token_mean, constant"):
        loss_denominator("mean", 1, 1, 1)


# ---- the gradient at every token ----

BROKEN = "examples.broken.losses"
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
PROBED = torch.tensor([[1.0], [-2.0], [0.0], [0.5]])
LOG_PROBS = -torch.linspace(0.1, 2.0, 16).view(4, 4)
PROMPT_TOKENS = torch.tensor([5, 5, 5, 5])  # two responses each


def metrics(
    objective: Objective, splits: list[slice], old: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics of one update in these micro-batches."""
    aggregation = objective.aggregation
    denominator = loss_denominator(aggregation, 4, int(MASK.sum()), max_tokens=4, num_prompts=2)
    sums: dict[str, float] = {}
    for split in splits:
        log_probs = LOG_PROBS[split].clone().requires_grad_()
        row_tokens = PROMPT_TOKENS[split] if aggregation == "prompt_mean" else None
        factors = None if weights is None else weights[split]
        loss, counts = policy_gradient_step(
            log_probs, MASK[split], objective=objective, denominator=denominator, advantages=PROBED[split],
            old_log_probs=(LOG_PROBS if old is None else old)[split], weights=factors, row_tokens=row_tokens,
        )  # fmt: skip
        loss.backward()
        assert log_probs.grad is not None
        given = log_probs.grad, MASK[split], PROBED[split], aggregation, denominator
        counts |= gradient_sums(*given, row_tokens, factors)
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
        one = torch.ones(1, 1)
        return float(stale(RatioInputs(-one, one, one.bool(), old * one))[1]["ratio"])

    assert ratio(-1.0) == pytest.approx(1)
    assert ratio(-2.0) == pytest.approx(1)  # the right one would be e


# ---- off-policy weights against plain loops, their summary by hand, and the effective sample size ----


RATIOS = torch.tensor([[0.25, 1.5, 3.0, 8.0], [0.5, 5.0, 9.0, 9.0]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([[-2.0, -1.0, -3.0, -2.5], [-1.0, -4.0, -0.5, -0.5]], dtype=torch.float64)
COUNTED = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
BAND = (0.5 - 1e-9, 5.0 + 1e-9)  # exp(log(5)) may round to more than 5


def limited_weights(learner, behaviour, mask, correction, cap=2.0, band=BAND, floor=0.0):
    """Return weights and where they are limited; `correction` is a name, or several joined by `+`."""
    inputs = CorrectionInputs.of(learner, behaviour, mask, torch.ones(len(mask), 1, dtype=learner.dtype))
    functions = [CORRECTIONS[name] for name in correction.split("+")]
    given = {"cap": cap, "band": band, "floor": floor}
    return correction_weights(inputs, [(function, arguments_of(function, given)) for function in functions])


@pytest.mark.parametrize(
    "corrections", [(), *((name,) for name in CORRECTIONS), ("truncate_token", "mask_product", "veto")], ids=str
)
def test_weights_of_a_loop_over_tokens(corrections):
    """Random ratios; a token without a finite logprob of the sampler is as if outside the mask."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behaviour = -torch.rand(12, 7, generator=generator, dtype=torch.float64) * 3
    learner, current = (behaviour + noise(12, 7) * 0.5 for _ in range(2))
    mask = torch.rand(12, 7, generator=generator) < 0.8
    behaviour[torch.rand(12, 7, generator=generator) < 0.1] = -torch.inf
    behaviour[2, :2] = torch.tensor([torch.nan, torch.inf])
    learner[~mask] = current[~mask] = torch.nan
    learner.requires_grad_()
    is_known = mask & behaviour.isfinite()
    functions = [CORRECTIONS[name] for name in corrections]
    for columns, band, now in (
        (1, (0.6, 1.5), None),
        (7, (None, 1.5), current),  # turns with advantages of their own
        (1, (0.6, None), current),
        (7, (None, None), None),
    ):
        advantages = noise(12, columns)
        advantages[::3] = 0.0
        options = {"cap": 1.4, "floor": 0.7, "band": band, "threshold": 0.5, "delta": 0.05}
        inputs = CorrectionInputs.of(learner, behaviour, mask, advantages, now)
        weights, _ = correction_weights(inputs, [(f, arguments_of(f, options)) for f in functions])
        assert not weights.requires_grad
        for row in range(12):
            logs, drift = [None] * 7, [None] * 7
            for t in range(7):
                if is_known[row, t]:
                    logs[t] = (learner - behaviour)[row, t].item()
                    drift[t] = (behaviour - (learner if now is None else now))[row, t].item()
            expected = is_known[row].double().tolist()
            for name in corrections:
                own = slow_weights(name, logs, advantages[row].expand(7).tolist(), drift, **options)
                expected = [a * b for a, b in zip(expected, own, strict=True)]
            assert weights[row].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("correction", "floor", "expected"),
    [
        # num_corrected, num_limited, num_dropped, sum, smallest, largest
        ("truncate_token", 0.0, (6, 3, 0, 0.25 + 1.5 + 2 + 2 + 0.5 + 2, 0.25, 2.0)),
        ("truncate_token", 0.4, (6, 4, 0, 0.4 + 1.5 + 2 + 2 + 0.5 + 2, 0.4, 2.0)),
        ("truncate_sequence", 0.0, (6, 6, 0, 12.0, 2.0, 2.0)),
        ("mask_band", 0.0, (6, 2, 2, 1.5 + 3 + 0.5 + 5, 0.0, 5.0)),
        ("mask_product", 0.0, (6, 4, 4, 2.0, 0.0, 1.0)),
        ("truncate_token+mask_product", 0.0, (6, 5, 4, 0.5 + 2, 0.0, 2.0)),  # 4 dropped, and 5 truncated
    ],
)
def test_summary_of_the_weights_by_hand(correction, floor, expected):
    weights, is_limited = limited_weights(BEHAVIOUR + RATIOS.log(), BEHAVIOUR, COUNTED, correction, floor=floor)
    sums = correction_sums(weights, is_limited, COUNTED.bool())
    assert [value.item() for value in sums.values()] == pytest.approx(expected)


def test_tokens_without_a_weight_are_in_no_summary():
    behaviour = BEHAVIOUR.clone()
    behaviour[0, 2:] = float("nan")
    weights, is_limited = limited_weights(behaviour + RATIOS.log(), behaviour, COUNTED, "mask_band")
    sums = correction_sums(weights, is_limited, COUNTED.bool() & behaviour.isfinite())
    assert (sums["num_corrected"], sums["num_limited"]) == (4, 1)
    assert correction_sums(weights, is_limited, COUNTED == 2) == {}


def test_the_band_includes_its_bounds():
    ones = torch.ones(1, 1)
    for band, weight in (((1.0, 2.0), 1), ((0.5, 1.0), 1), ((1.1, 2.0), 0)):
        assert limited_weights(ones, ones, ones, "mask_band", band=band)[0].item() == weight


@pytest.mark.parametrize("correction", WEIGHING)
def test_extreme_ratios_are_finite_and_nan_of_the_learner_is_not_hidden(correction):
    learner = torch.tensor([[0.0], [-1e4], [-torch.inf]])
    behaviour = torch.tensor([[-1e4], [0.0], [0.0]])
    weights, _ = limited_weights(learner, behaviour, torch.ones(3, 1), correction, 1e12, (0.0, 1e12))
    torch.testing.assert_close(weights, torch.tensor([[20.0], [-20.0], [-20.0]]).exp())
    nan = torch.full((1, 1), torch.nan)
    assert limited_weights(nan, torch.zeros(1, 1), torch.ones(1, 1), correction)[0].isnan()


def test_mismatch_and_effective_sample_size_by_hand():
    """Log ratios 0, 0.5 and -1, in float64; equal weights have 1, and those of which one of two rules 1/2."""
    behaviour = torch.full((2, 4), -1.0)
    learner = behaviour + torch.tensor([[0.0, 0.5, 3.0, 3.0], [-1.0, torch.nan, 3.0, 3.0]])
    behaviour[0, 2:] = torch.tensor([-torch.inf, torch.nan])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    weights = ("weight_sum", "weight_square_sum", "num_weights")
    sums = mismatch_sums(learner.requires_grad_(), behaviour, mask)
    assert not any(value.requires_grad for value in sums.values())
    kl = (math.exp(0.5) - 1 - 0.5) + (math.exp(-1.0) - 1 + 1.0)
    assert sums["mismatch_kl"].item() == pytest.approx(kl, rel=1e-12)
    assert sums["logprob_diff_max"].item() == 1.0
    total, of_squares = 1 + math.exp(0.5) + math.exp(-1.0), 1 + math.e + math.exp(-2.0)
    assert [sums[name].item() for name in weights] == pytest.approx([total, of_squares, 3], rel=1e-12)
    fraction = effective_sample_fraction(*(sums[name] for name in weights))
    assert fraction == pytest.approx(total**2 / (3 * of_squares))
    assert effective_sample_fraction(3 * 0.7, 3 * 0.49, 3) == pytest.approx(1.0)  # equal weights
    one_rules = mismatch_sums(torch.tensor([[30.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2))
    assert effective_sample_fraction(*(one_rules[name] for name in weights)) == pytest.approx(0.5)
    assert one_rules["weight_sum"].item() == pytest.approx(math.exp(20) + 1)
