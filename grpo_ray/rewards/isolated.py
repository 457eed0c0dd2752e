"""A reward function in a process that can die: computer algebra on a model's answer may never end.

A timeout inside the Scorer would not do: `signal.alarm` needs the main thread, and no Python code interrupts a
big power that is being computed. Here the kernel ends the worker, and the next answer gets a new one.
What the worker may do besides computing: `rewards/confinement.py`.
"""

import json
import os
import signal
import subprocess
import sys

from grpo_ray.environment import reward_environment


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
        if self._worker is not None and self._worker.poll() is not None:
            self._bury(self._worker)  # it died between answers: no fault of this one
        worker = self._worker = self._worker or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            # Escaped, so that no response holds a line break or half a character.
            worker.stdin.write(json.dumps([response, ground_truth]) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            raise ScoringError(f"grading ended with {self._bury(worker)}: {response[-200:]!r}")
        return json.loads(line)

    def _start(self) -> "subprocess.Popen[str]":
        # A worker dies with the thread that started it; of a Ray actor that is the main thread.
        return subprocess.Popen(
            [sys.executable, "-m", "grpo_ray.rewards.worker", *self._arguments, str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, encoding="utf-8", errors="replace", env=reward_environment(),
        )  # fmt: skip

    def _bury(self, worker: "subprocess.Popen[str]") -> str:
        """How a worker ended, with the last it said."""
        self._worker = None
        _, words = worker.communicate()
        status = worker.returncode
        ending = signal.Signals(-status).name if status < 0 else f"status {status}"
        return " ".join([ending, *words.strip().splitlines()[-1:]])

    def close(self) -> None:
        """The worker ends with its input."""
        if self._worker is not None:
            self._worker.communicate()
            self._worker = None
