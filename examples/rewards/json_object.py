"""A reward for a JSON object with the ground truth's fields and values.

    task.reward=examples.rewards.json_object:reward_fn

It returns a dict, so that metrics and evaluations show format and answer separately.
"""

import json
from typing import Any


def reward_fn(response: str, ground_truth: str) -> dict[str, float]:
    """Return 0.2 for a valid JSON object, plus 0.8 x the share of the truth's fields with the right value."""
    given, wanted = _read_object(response), json.loads(ground_truth)
    if given is None:
        return {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}
    num_right = sum(key in given and given[key] == value for key, value in wanted.items())
    share = num_right / len(wanted)
    return {"reward": 0.2 + 0.8 * share, "format_reward": 1.0, "answer_reward": float(share == 1)}


def _read_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # most responses of an untrained policy are not JSON
        return None
    return value if isinstance(value, dict) else None
