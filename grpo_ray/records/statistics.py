"""Estimates from several responses per prompt, and their uncertainty."""

import math

import numpy as np

LEVEL = 0.95
NUM_RESAMPLES = 2000
MAX_DRAWS = 2**22  # indices in memory at a time


def pass_at_k(num_samples: int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """Return unbiased estimates of the chance that at least one of k responses is correct; `[prompts]` float64.

    1 - C(n - c, k) / C(n, k) for c correct responses of n (Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code", equation 1), as a product of factors in [0, 1], which does not overflow.

    Args:
        num_correct: `[prompts]` integers between 0 and `num_samples`.
    """
    assert 1 <= k <= num_samples
    counts, inverse = np.unique(num_correct, return_inverse=True)
    missed = np.array([_all_wrong(num_samples, int(count), k) for count in counts])
    return 1.0 - missed[inverse]


def _all_wrong(n: int, c: int, k: int) -> float:
    """Return C(n - c, k) / C(n, k), the chance that k draws miss all c correct responses."""
    if n - c < k:
        return 0.0
    return float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def powers_of_two(num_samples: int) -> list[int]:
    """Return the values of k for pass@k: 1, 2, 4, ... and `num_samples` itself."""
    return sorted({1 << exponent for exponent in range(num_samples.bit_length())} | {num_samples})


def bootstrap_intervals(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return 95% percentile intervals of the mean over prompts; `[statistics, 2]` from `[prompts, statistics]`.

    Prompts are resampled rather than responses, because the responses to one prompt are correlated (Efron &
    Tibshirani 1993, chapter 13). If all prompts agree the interval has no width, even with few prompts.
    """
    num_prompts, num_statistics = values.shape
    rng = np.random.default_rng(seed)
    means = np.empty((NUM_RESAMPLES, num_statistics))
    at_a_time = max(1, MAX_DRAWS // (num_prompts * num_statistics))
    for start in range(0, NUM_RESAMPLES, at_a_time):
        size = min(at_a_time, NUM_RESAMPLES - start)
        drawn = rng.integers(num_prompts, size=(size, num_prompts))
        means[start : start + size] = values[drawn].mean(axis=1)
    tail = (1.0 - LEVEL) / 2
    intervals: np.ndarray = np.quantile(means, (tail, 1.0 - tail), axis=0).T
    return intervals


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean of `[prompts]` values; 0 for one prompt."""
    return float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
