"""A reward for responses that match a regular expression: a term for a sum with a reward of the answer.

task:
  reward:
    - reward: r1_zero
    - reward: examples.rewards.regex_format:reward_fn
      weight: 0.1
      arguments: {pattern: "(?s).+Check:.+</answer>"}
"""

import re


def reward_fn(response: str, ground_truth: str, pattern: str) -> dict[str, float]:
    """Return 1 if the pattern matches the whole response, apart from white space around it."""
    has_format = float(re.fullmatch(pattern, response.strip()) is not None)
    return {"reward": has_format, "format_reward": has_format, "answer_reward": 0.0}
