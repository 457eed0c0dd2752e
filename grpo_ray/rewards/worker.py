"""The process behind `IsolatedReward`: a JSON line in for each response, a JSON line out."""

import json
import os
import signal
import sys
from typing import TextIO

from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.confinement import (
    die_with_parent,
    drop_capabilities,
    enter_sandbox,
    limit_resources,
)


def _serve(reward: str, timeout_s: float, memory_gib: float, parent: int) -> None:
    """Answer a line a request. SIGALRM's default action ends the process, wherever it is computing."""
    die_with_parent(parent)
    limit_resources(memory_gib)
    drop_capabilities()
    enter_sandbox()
    replies = _private_stdout()
    reward_fn = get_reward_fn(reward)
    for line in sys.stdin:
        response, ground_truth = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        scores = reward_fn(response, ground_truth)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(scores), file=replies, flush=True)


def _private_stdout() -> TextIO:
    """Standard output, for the replies alone: what a library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.set_blocking(2, False)  # nobody reads it before the end: a full pipe must lose words, not hold up
    return replies


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
