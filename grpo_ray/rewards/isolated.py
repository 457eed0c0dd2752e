"""A reward function in a process that can die: computer algebra on a model's answer may never end.

A timeout inside the Scorer would not do: `signal.alarm` needs the main thread, and no Python code interrupts a
big power that is being computed. Here the kernel ends the worker, and the next answer gets a new one.
"""

import json
import subprocess
import sys


class ScoringError(RuntimeError):
    """The answer took too long, or too much memory, to grade."""


class IsolatedReward:
    """Calls `REWARDS[reward]` in a child process, started at first use and again after it died."""

    def __init__(self, reward: str, timeout_s: float, memory_gib: float) -> None:
        self._arguments = [reward, str(timeout_s), str(memory_gib)]
        self._worker: subprocess.Popen[str] | None = None

    def __call__(self, response: str, ground_truth: str) -> dict[str, float]:
        """As the reward function itself.

        Raises:
            ScoringError: the worker died on this answer.
        """
        if self._worker is None:
            command = [sys.executable, "-m", "grpo_ray.rewards.worker", *self._arguments]
            self._worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        self._worker.stdin.write(json.dumps([response, ground_truth]) + "\n")
        self._worker.stdin.flush()
        line = self._worker.stdout.readline()
        if not line:
            status = self._worker.wait()
            self._worker = None
            raise ScoringError(f"grading ended with status {status}: {response[-200:]!r}")
        return json.loads(line)

    def close(self) -> None:
        """The worker ends with its input."""
        if self._worker is not None:
            self._worker.communicate()
            self._worker = None
