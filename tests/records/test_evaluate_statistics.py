"""pass@k matches enumeration; bootstrap intervals match known distributions."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from grpo_ray.records.evaluation_summary import bootstrap_intervals, pass_at_k, powers_of_two, standard_error


@pytest.mark.parametrize("n", [1, 3, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(n: int) -> None:
    for k in range(1, n + 1):
        subsets = list(combinations(range(n), k))
        expected = [
            Fraction(sum(any(sample < c for sample in subset) for subset in subsets), len(subsets))
            for c in range(n + 1)
        ]
        estimates = pass_at_k(n, np.arange(n + 1), k)
        assert estimates == pytest.approx([float(share) for share in expected], abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    # C(10000, 100) has 242 digits: not an exact float64, and near the end of its range.
    value = pass_at_k(10_000, np.array([0, 1, 9_950]), 100)
    assert value == pytest.approx([0.0, 100 / 10_000, 1.0])
    assert pass_at_k(100_000, np.array([50_000]), 50_000)[0] == 1.0


@pytest.mark.parametrize(("n", "ks"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_powers_of_two(n: int, ks: list[int]) -> None:
    assert powers_of_two(n) == ks


def test_intervals_of_two_prompts() -> None:
    """The resampled mean is 0, 1/2 or 1 with probability 1/4, 1/2 and 1/4; equal prompts have no width."""
    values = np.array([[0.0, 0.7], [1.0, 0.7]])
    assert bootstrap_intervals(values) == pytest.approx(np.array([[0.0, 1.0], [0.7, 0.7]]))


@pytest.mark.slow
def test_intervals_cover_the_true_mean_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(1)
    draws = rng.random((150, 400)) < 0.3  # 400 evaluations of 150 prompts, as statistics of one call
    intervals = bootstrap_intervals(draws.astype(float), seed=2)
    covered = ((intervals[:, 0] <= 0.3) & (intervals[:, 1] >= 0.3)).mean()
    assert 0.92 <= covered <= 0.98
    # About as wide as the normal interval.
    assert (intervals[:, 1] - intervals[:, 0]).mean() == pytest.approx(2 * 1.96 * np.sqrt(0.21 / 150), rel=0.05)


def test_intervals_are_reproducible_and_differ_by_seed() -> None:
    values = np.random.default_rng(3).random((50, 2))
    assert np.array_equal(bootstrap_intervals(values), bootstrap_intervals(values))
    assert not np.array_equal(bootstrap_intervals(values), bootstrap_intervals(values, seed=1))


def test_standard_error() -> None:
    assert standard_error(np.array([1.0, 0.0, 0.5])) == pytest.approx(0.5 / np.sqrt(3))
    assert standard_error(np.array([1.0])) == 0.0
