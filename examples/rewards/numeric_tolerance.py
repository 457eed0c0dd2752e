"""A reward for a last number within a relative tolerance of the ground truth.

    task:
      reward:
        - reward: examples.rewards.numeric_tolerance:reward_fn
          arguments: {tolerance: 0.05}

The simplest form: a function that returns one number.
"""

import math
import re

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")


def reward_fn(response: str, ground_truth: str, tolerance: float = 0.01) -> float:
    """Return 1 within `tolerance` (relative) of the truth, else 0; -1 for a response without a number."""
    numbers = NUMBER.findall(response)
    if not numbers:
        return -1.0
    given, wanted = (float(text.replace(",", "")) for text in (numbers[-1], ground_truth))
    return float(math.isclose(given, wanted, rel_tol=tolerance))
