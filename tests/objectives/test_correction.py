"""Off-policy weights by hand, the tokens that they exclude, and the effective sample size."""

import math

import pytest
import torch
from slow_objectives import slow_weights

from grpo_ray.config.algorithm import WEIGHING
from grpo_ray.objectives import CORRECTIONS, CorrectionInputs, correction_weights
from grpo_ray.objectives.correction import correction_sums, effective_sample_fraction, effective_sample_sums
from grpo_ray.objectives.inputs import arguments_of

CAP, BAND = 2.0, (0.5, 5.0)

RATIOS = torch.tensor([[0.25, 1.5, 3.0, 8.0], [0.5, 5.0, 9.0, 9.0]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([[-2.0, -1.0, -3.0, -2.5], [-1.0, -4.0, -0.5, -0.5]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
ADVANTAGES = torch.tensor([[1.0], [-1.0]])


def importance_weights(learner, behaviour, mask, correction, cap, band, **options):
    return limited_weights(learner, behaviour, mask, correction, cap, band, **options)[0]


def limited_weights(learner, behaviour, mask, correction, cap, band, **options):
    """Return weights and where they are limited; `correction` is a name, or several joined by `+`."""
    inputs = CorrectionInputs.of(learner, behaviour, mask, ADVANTAGES[: len(mask)].to(learner.dtype))
    functions = [CORRECTIONS[name] for name in correction.split("+") if name != "none"]
    given = {"cap": cap, "band": band, "delta": 0.1, **options}
    return correction_weights(inputs, [(function, arguments_of(function, given)) for function in functions])


def weights_of(correction, ratios=RATIOS, behaviour=BEHAVIOUR, mask=MASK, cap=CAP, band=BAND, **options):
    return importance_weights(behaviour + ratios.log(), behaviour, mask, correction, cap, band, **options)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ("none", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]),
        ("truncate_token", [[0.25, 1.5, 2.0, 2.0], [0.5, 2.0, 0.0, 0.0]]),
        ("truncate_sequence", [[2.0, 2.0, 2.0, 2.0], [2.0, 2.0, 0.0, 0.0]]),  # products 9 and 2.5
        ("mask_band", [[0.0, 1.5, 3.0, 0.0], [0.5, 5.0, 0.0, 0.0]]),
        ("mask_product", [[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]),  # products 9 and 2.5
        ("mask_geometric", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]),  # 9^(1/4) = 1.73, 2.5^(1/2) = 1.58
        ("truncate_token+mask_product", [[0.0, 0.0, 0.0, 0.0], [0.5, 2.0, 0.0, 0.0]]),
        ("veto", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]),
        ("opsm", [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]),  # the sampler found all less likely
    ],
)
def test_weights_by_hand(correction, expected):
    # exp(log(5)) may round to more than 5
    weights = weights_of(correction, band=(0.5 - 1e-9, 5.0 + 1e-9))
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("correction", "options", "kept"),
    [
        ("mask_geometric", {"band": (1.6, 2.0)}, [True, False]),
        ("mask_geometric", {"band": (None, 1.6)}, [False, True]),
        ("mask_geometric", {"band": (1.6, None)}, [True, False]),
        ("mask_product", {"band": (8.9, None)}, [True, False]),
        ("mask_product", {"band": (None, None)}, [True, True]),
        ("veto", {"threshold": 0.3}, [False, True]),
        ("veto", {"threshold": 0.6}, [False, False]),
        ("veto", {"threshold": 0.2}, [True, True]),
        ("veto+mask_product", {"threshold": 0.3, "band": (None, 2.0)}, [False, False]),
    ],
)
def test_which_responses_are_dropped(correction, options, kept):
    weights = weights_of(correction, **options)
    assert weights.max(dim=1).values.tolist() == [float(value) for value in kept]


def test_truncation_with_a_floor():
    weights, is_limited = limited_weights(
        BEHAVIOUR + RATIOS.log(), BEHAVIOUR, MASK, "truncate_token", 2.0, BAND, floor=0.4
    )
    expected = torch.tensor([[0.4, 1.5, 2.0, 2.0], [0.5, 2.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(weights, expected)
    assert is_limited[MASK.bool()].tolist() == [True, False, True, True, False, True]
    assert weights_of("truncate_sequence", cap=20.0, floor=4.0)[:, 0].tolist() == pytest.approx([9.0, 4.0])


def test_opsm_drops_drifted_responses_with_a_negative_advantage():
    """Mean drift log(sampler / current): -0.2 and 0.3 nats per token; the ratio before the update is
    another."""
    current = BEHAVIOUR - torch.tensor([[0.1, -0.5, -0.6, 0.2], [0.2, 0.4, 9.0, 9.0]], dtype=torch.float64)
    for signs, delta, kept in (
        ([1.0, -1.0], 0.29, [1, 0]),
        ([1.0, -1.0], 0.31, [1, 1]),
        ([-1.0, 1.0], 0.29, [1, 1]),
        ([-1.0, 0.0], -0.21, [0, 1]),
        ([-1.0, -1.0], -0.19, [1, 0]),
    ):
        advantages = torch.tensor(signs, dtype=torch.float64)[:, None]
        inputs = CorrectionInputs.of(BEHAVIOUR + RATIOS.log(), BEHAVIOUR, MASK, advantages, current)
        weights, _ = correction_weights(inputs, [(CORRECTIONS["opsm"], {"delta": delta})])
        assert weights[:, 0].tolist() == kept, (signs, delta)


def test_opsm_drops_only_turns_with_a_negative_advantage():
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0], [0.0, -1.0, -1.0, -1.0]], dtype=torch.float64)
    inputs = CorrectionInputs.of(BEHAVIOUR, BEHAVIOUR, MASK, advantages, BEHAVIOUR - 0.2)
    weights, _ = correction_weights(inputs, [(CORRECTIONS["opsm"], {"delta": 0.1})])
    assert weights.tolist() == [[1, 0, 0, 1], [1, 0, 0, 0]]


@pytest.mark.parametrize("correction", [*CORRECTIONS, "truncate_token+mask_product+veto"])
def test_weights_of_a_loop_over_tokens(correction):
    """Random ratios; a token without a finite logprob of the sampler is as if outside the mask."""
    generator = torch.Generator().manual_seed(3)
    behaviour = -torch.rand(12, 7, generator=generator, dtype=torch.float64) * 3
    learner = behaviour + torch.randn(12, 7, generator=generator, dtype=torch.float64) * 0.5
    mask = torch.rand(12, 7, generator=generator) < 0.8
    behaviour[torch.rand(12, 7, generator=generator) < 0.1] = -torch.inf
    behaviour[2, :2] = torch.tensor([torch.nan, torch.inf])
    learner[~mask] = torch.nan
    advantages = torch.randn(12, 1, generator=generator, dtype=torch.float64)
    options = {"cap": 1.4, "floor": 0.7, "band": (0.6, 1.5), "threshold": 0.5, "delta": 0.05}
    inputs = CorrectionInputs.of(learner.requires_grad_(), behaviour, mask, advantages)
    functions = [CORRECTIONS[name] for name in correction.split("+")]
    weights, _ = correction_weights(inputs, [(f, arguments_of(f, options)) for f in functions])
    assert not weights.requires_grad
    for row in range(12):
        logs = [
            (learner - behaviour)[row, t].item() if mask[row, t] and behaviour[row, t].isfinite() else None
            for t in range(7)
        ]
        expected = [1.0 if log is not None else 0.0 for log in logs]
        for name in correction.split("+"):
            own = slow_weights(name, logs, [advantages[row].item()] * 7, **options)
            expected = [a * b for a, b in zip(expected, own, strict=True)]
        assert weights[row].tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        # num_corrected, num_limited, num_dropped, sum, smallest, largest
        ("truncate_token", (6, 3, 0, 0.25 + 1.5 + 2 + 2 + 0.5 + 2, 0.25, 2.0)),
        ("truncate_sequence", (6, 6, 0, 12.0, 2.0, 2.0)),
        ("mask_band", (6, 2, 2, 1.5 + 3 + 0.5 + 5, 0.0, 5.0)),
        ("mask_product", (6, 4, 4, 2.0, 0.0, 1.0)),
        ("truncate_token+mask_product", (6, 5, 4, 0.5 + 2, 0.0, 2.0)),  # limited: 4 dropped, and 5 truncated
    ],
)
def test_summary_of_the_weights_by_hand(correction, expected):
    learner = BEHAVIOUR + RATIOS.log()
    weights, is_limited = limited_weights(learner, BEHAVIOUR, MASK, correction, CAP, (0.5 - 1e-9, 5.0 + 1e-9))
    sums = correction_sums(weights, is_limited, MASK.bool())
    assert [value.item() for value in sums.values()] == pytest.approx(expected)


def test_tokens_without_a_weight_are_in_no_summary():
    behaviour = BEHAVIOUR.clone()
    behaviour[0, 2:] = float("nan")
    learner = behaviour + RATIOS.log()
    weights, is_limited = limited_weights(learner, behaviour, MASK, "mask_band", CAP, (0.5 - 1e-9, 5 + 1e-9))
    sums = correction_sums(weights, is_limited, MASK.bool() & behaviour.isfinite())
    assert (sums["num_corrected"], sums["num_limited"]) == (4, 1)
    assert correction_sums(weights, is_limited, MASK == 2) == {}


def test_the_band_includes_its_bounds():
    ones = torch.ones(1, 1)
    assert importance_weights(ones, ones, ones, "mask_band", CAP, (1.0, 2.0)).item() == 1.0
    assert importance_weights(ones, ones, ones, "mask_band", CAP, (0.5, 1.0)).item() == 1.0
    assert importance_weights(ones, ones, ones, "mask_band", CAP, (1.1, 2.0)).item() == 0.0


@pytest.mark.parametrize("correction", WEIGHING)
def test_extreme_ratios_are_finite_and_nan_of_the_learner_is_not_hidden(correction):
    learner = torch.tensor([[0.0], [-1e4], [-torch.inf]])
    behaviour = torch.tensor([[-1e4], [0.0], [0.0]])
    weights = importance_weights(learner, behaviour, torch.ones(3, 1), correction, 1e12, (0.0, 1e12))
    torch.testing.assert_close(weights, torch.tensor([[20.0], [-20.0], [-20.0]]).exp())
    nan = torch.full((1, 1), torch.nan)
    assert importance_weights(nan, torch.zeros(1, 1), torch.ones(1, 1), correction, CAP, BAND).isnan()


def test_effective_sample_size_by_hand():
    """Weights 1, 1, 4: (1 + 1 + 4)^2 / (3 * 18) = 2/3."""
    ratios = torch.tensor([[1.0, 4.0, 3.0], [1.0, 7.0, 7.0]], dtype=torch.float64)
    behaviour = torch.full((2, 3), -1.0, dtype=torch.float64)
    learner = behaviour + ratios.log()
    behaviour[0, 2] = -torch.inf
    learner[1, 1] = torch.nan
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sums = effective_sample_sums(learner.requires_grad_(), behaviour, mask)
    assert not any(value.requires_grad for value in sums.values())
    assert sums["weight_sum"].item() == pytest.approx(6.0)
    assert sums["weight_square_sum"].item() == pytest.approx(18.0)
    assert sums["num_weights"].item() == 3
    fraction = effective_sample_fraction(**{name: value.item() for name, value in sums.items()})
    assert fraction == pytest.approx(2 / 3)


def test_effective_sample_fraction_at_its_ends():
    assert effective_sample_fraction(3 * 0.7, 3 * 0.49, 3) == pytest.approx(1.0)  # equal weights
    one_rules = effective_sample_sums(torch.tensor([[30.0, 0.0]]), torch.zeros(1, 2), torch.ones(1, 2))
    fraction = effective_sample_fraction(**{name: value.item() for name, value in one_rules.items()})
    assert fraction == pytest.approx(0.5)
    assert one_rules["weight_sum"].item() == pytest.approx(math.exp(20) + 1)
