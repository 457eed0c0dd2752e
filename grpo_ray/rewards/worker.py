"""The process behind `IsolatedReward`: a JSON line in for each response, a JSON line out."""

import json
import resource
import signal
import sys

from grpo_ray.rewards import get_reward_fn


def _serve(reward: str, timeout_s: float, memory_gib: float) -> None:
    """Answer a line a request. SIGALRM's default action ends the process, wherever it is computing."""
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    reward_fn = get_reward_fn(reward)
    for line in sys.stdin:
        response, ground_truth = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        scores = reward_fn(response, ground_truth)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(scores), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
