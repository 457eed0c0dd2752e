"""Worker processes that grade answers and can be killed: computer algebra on a model's answer may never end.

A timeout in the Scorer's own process would not do: `signal.alarm` needs the main thread, and no Python code
interrupts a big power that is being computed. What a worker may do besides computing: rewards/confinement.py.

    RewardPool --(socket)--> nursery, which has imported everything    (nursery.py)
        |                       | forks
        +------(a socket)----> worker xN                               (worker.py)
"""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config.reward import Reward
from grpo_ray.errors import RunError
from grpo_ray.rewards.isolation.worker_process import Nursery, WorkerProcess

MAX_CHUNK = 16  # answers sent to a worker at once
MAX_CHUNK_BYTES = 64 * 1024  # less than a socket holds, so that nobody waits to send while the other does
PATIENCE_S = 0.1  # so long answers wait for one that was sent before them; to restart a worker takes far less
MAX_FRUITLESS = 3  # workers in a row that ended without having begun an answer

Scores = dict[str, float]
CLOSED = "no answer can be graded: the pool is closed"


class ScoringError(RuntimeError):
    """The answer could not be graded: it took too long or too much memory, or the reward function raised."""


@dataclass
class _Batch:
    """The answers of one call, and what became of them so far."""

    results: list[Any]
    num_left: int
    done: Future[list[Any]] = field(default_factory=Future)


@dataclass(frozen=True)
class _Answer:
    line: bytes
    batch: _Batch
    place: int


class RewardPool:
    """Grades answers in `num_workers` processes, each answer within `timeout_s` and `memory_gib`.

    An answer that ends its worker, or would keep it busy for longer, costs that worker and is an error; a
    fresh worker takes the place in milliseconds. May be called from several threads at a time.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], num_workers: int, timeout_s: float, memory_gib: float
    ) -> None:
        """
        Args:
            rewards: of each task, by its name.
        """
        self._timeout_s, self._num_workers = timeout_s, num_workers
        self._nursery = Nursery(rewards, memory_gib)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Answer] = deque()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Wait until workers can be had.

        Raises:
            RunError: they cannot, and why.
        """
        self._nursery.new_worker().close()

    def grade(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[Scores | ScoringError]:
        """What the task's reward function gives each (response, ground truth), or why it gives nothing.

        Raises:
            RunError: workers cannot be started, or the pool is closed.
        """
        if not pairs:
            return []
        batch = _Batch([None] * len(pairs), len(pairs))
        # Escaped by JSON, so that no response holds a line break or half a character.
        lines = [json.dumps([task, *pair]).encode() + b"\n" for pair in pairs]
        with self._changed:
            if self._is_closed:
                raise RunError(CLOSED)
            self._waiting.extend(_Answer(line, batch, place) for place, line in enumerate(lines))
            self._changed.notify_all()
        return batch.done.result()

    def close(self) -> None:
        """End all processes; answers that are being graded fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._nursery.close()
        for thread in self._threads:
            thread.join()
        self._fail(self._waiting, RunError(CLOSED))

    def _work(self) -> None:
        """What the thread of each worker does."""
        worker: WorkerProcess | None = None
        while chunk := self._take():
            try:
                worker = self._grade_chunk(worker, chunk)
            except Exception as error:  # there is no worker to be had: who waits for these answers must know
                worker = None
                self._fail(chunk, error)
        if worker is not None:
            worker.close()

    def _take(self) -> deque[_Answer]:
        """The next answers for one worker; none when the pool is closed.

        Several save time, but wait for each other: so only while all workers have more than that to do.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            chunk: deque[_Answer] = deque()
            size = min(MAX_CHUNK, max(1, len(self._waiting) // (2 * self._num_workers)))
            num_bytes = 0
            while self._waiting and not self._is_closed and len(chunk) < size:
                num_bytes += len(self._waiting[0].line)
                if chunk and num_bytes > MAX_CHUNK_BYTES:
                    break
                chunk.append(self._waiting.popleft())
            return chunk

    def _grade_chunk(self, worker: WorkerProcess | None, chunk: deque[_Answer]) -> WorkerProcess | None:
        """Settle all answers of the chunk, with as many workers as it takes; the last one if it lives."""
        num_fruitless = 0
        while chunk:
            num_left = len(chunk)
            worker = worker or self._nursery.new_worker()
            if not self._serve(worker, chunk):
                worker.close()
                worker = None
            num_fruitless = num_fruitless + 1 if len(chunk) == num_left else 0
            if num_fruitless > MAX_FRUITLESS:
                raise RunError("the workers that grade are ended by something else, one after the other")
        return worker

    def _serve(self, worker: WorkerProcess, chunk: deque[_Answer]) -> bool:
        """Have the worker grade the chunk from its left on; False when it is not to be used again."""
        worker.send([answer.line for answer in chunk])
        while chunk:
            try:
                kind, *value = self._receive(worker, chunk)
            except TimeoutError:
                self._settle(chunk.popleft(), f"longer than {self._timeout_s:g} s (scorer.timeout_s)")
                return False
            if kind == "ended":
                ending, num_begun = value
                if num_begun > worker.num_settled:  # else it died between answers: no fault of the next one
                    self._settle(chunk.popleft(), ending)
                return False
            worker.num_settled += 1
            self._settle(chunk.popleft(), value[0])
        return worker.num_settled == worker.num_sent

    def _receive(self, worker: WorkerProcess, chunk: deque[_Answer]) -> list[Any]:
        """What the worker says of the chunk's first answer; if that takes long, the others are given back.

        Raises:
            TimeoutError: it says nothing within the time limit.
        """
        patience_s = min(PATIENCE_S, self._timeout_s / 2)
        with contextlib.suppress(TimeoutError):
            return worker.receive(patience_s)
        with self._changed:
            while len(chunk) > 1:
                self._waiting.appendleft(chunk.pop())
            self._changed.notify_all()
        return worker.receive(self._timeout_s - patience_s)

    def _fail(self, answers: deque[_Answer], error: Exception) -> None:
        with self._lock:
            for answer in answers:
                if not answer.batch.done.done():
                    answer.batch.done.set_exception(error)

    def _settle(self, answer: _Answer, result: Scores | str) -> None:
        with self._lock:
            batch = answer.batch
            batch.results[answer.place] = ScoringError(result) if isinstance(result, str) else result
            batch.num_left -= 1
            if not batch.num_left and not batch.done.done():
                batch.done.set_result(batch.results)
