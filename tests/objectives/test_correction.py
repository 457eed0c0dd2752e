"""Off-policy weights against plain loops, their summary by hand, and the effective sample size."""

import math

import pytest
import torch
from slow_objectives import slow_weights

from grpo_ray.config.algorithm import WEIGHING
from grpo_ray.objectives import CORRECTIONS, CorrectionInputs, correction_weights
from grpo_ray.objectives.correction import correction_sums, effective_sample_fraction, effective_sample_sums
from grpo_ray.objectives.inputs import arguments_of

RATIOS = torch.tensor([[0.25, 1.5, 3.0, 8.0], [0.5, 5.0, 9.0, 9.0]], dtype=torch.float64)
BEHAVIOUR = torch.tensor([[-2.0, -1.0, -3.0, -2.5], [-1.0, -4.0, -0.5, -0.5]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
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
    weights, is_limited = limited_weights(BEHAVIOUR + RATIOS.log(), BEHAVIOUR, MASK, correction, floor=floor)
    sums = correction_sums(weights, is_limited, MASK.bool())
    assert [value.item() for value in sums.values()] == pytest.approx(expected)


def test_tokens_without_a_weight_are_in_no_summary():
    behaviour = BEHAVIOUR.clone()
    behaviour[0, 2:] = float("nan")
    weights, is_limited = limited_weights(behaviour + RATIOS.log(), behaviour, MASK, "mask_band")
    sums = correction_sums(weights, is_limited, MASK.bool() & behaviour.isfinite())
    assert (sums["num_corrected"], sums["num_limited"]) == (4, 1)
    assert correction_sums(weights, is_limited, MASK == 2) == {}


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
