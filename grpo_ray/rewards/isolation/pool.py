"""A pool of worker processes that can be killed: computer algebra on a model's answer may never end.

A timeout in the Scorer's own process would not suffice: `signal.alarm` requires the main thread, and no Python
code can interrupt the computation of a big power. confinement.py lists what a worker may do besides computing.

    RewardPool --(socket)--> fork server, which has imported everything  (fork_server.py)
        |                       | forks
        +------(a socket)----> worker xN                                 (worker.py)
"""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.config.reward import Reward, RewardTerm, is_own
from grpo_ray.errors import RunError
from grpo_ray.rewards.base import NOTHING, About, Overrun, Result, ScoringError
from grpo_ray.rewards.isolation.messages import Garbage, max_bytes
from grpo_ray.rewards.isolation.processes import ForkServer, WorkerProcess
from grpo_ray.rewards.networked import longest_s

MAX_CHUNK = 16  # answers sent to a worker at once
MAX_CHUNK_BYTES = 64 * 1024  # less than a socket holds, so that pool and worker never both wait to send
PATIENCE_S = 0.1  # answers wait this long for one sent before them; restarting a worker takes far less
LEAST_SHARE = 0.9  # of the time limit that a worker must have run, for an answer to have taken too long
IDLE_SHARE = 0.01  # of a processor; a worker that gets less, and waits for none, sleeps or was stopped
MAX_EXTENSIONS = 16  # by half the time limit, for a worker that runs too little
MAX_FRUITLESS = 3  # workers in a row that ended without having begun an answer

CLOSED = "no answer can be graded: the pool is closed"


class Starved(TimeoutError):
    """An answer took too long while its worker hardly ran: asleep, stopped, or on a busy machine."""


@dataclass(frozen=True)
class _Answer:
    """A group of answers to be graded together, mostly of one, as the line that a worker reads."""

    line: bytes
    limit_s: float
    size: int  # of the group
    done: Future[list[Result]] = field(default_factory=Future)

    def settle(self, result: Result | list[Result]) -> None:
        """Note the result, of a group one for all or one for each."""
        self.done.set_result(result if isinstance(result, list) else [result] * self.size)


@dataclass(frozen=True)
class Grading:
    """The answers of one call, which are being graded."""

    answers: Sequence[_Answer]

    def result(self) -> list[Result]:
        """Wait for all, and return their results in order.

        Raises:
            RunError: workers cannot be started, or the pool is closed.
        """
        return [result for answer in self.answers for result in answer.done.result()]


class RewardPool:
    """A pool of `num_workers` processes that grade each answer within `timeout_s` and `memory_gib`.

    An answer that ends its worker, or would keep it busy for longer, costs that worker; a fresh worker replaces
    it in milliseconds. Several threads may call the pool at the same time.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], num_workers: int, timeout_s: float, memory_gib: float,
        readable_paths: Sequence[str] = (), network: RewardTerm | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            rewards: each task's reward, of one term, by the task's name.
            readable_paths: files and folders that the rewards may read, besides modules.
            network: the only term of the only reward, which may use the network, and has its own time limit.
        """
        self._too_long = f"longer than {timeout_s:g} s (scorer.timeout_s)"
        if network is not None:
            num_workers = min(num_workers, network.concurrency)
            self._too_long = "longer than all its calls may take (timeout_s and retries of its term)"
        self._timeout_s, self._num_workers = timeout_s, num_workers
        self._own = {task for task, reward in rewards.items() if is_own(reward)}
        self._network = network
        self._num_slots = network.concurrency // num_workers if network is not None else 0
        self._fork_server = ForkServer(rewards, memory_gib, readable_paths, self._num_slots)
        self._changed = threading.Condition()
        self._waiting: deque[_Answer] = deque()
        self._is_closed = False
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_workers)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        """Wait until workers can be started.

        Raises:
            RunError: they cannot; the message says why.
        """
        self._fork_server.new_worker().close()

    def submit(self, task: str, pairs: Sequence[tuple[str, str]], about: About = NOTHING) -> Grading:
        """Begin to grade each (response, ground truth): its result is the task's scores, or why it has none.

        Ungradable is the answer's doing: it is an Overrun, or the reward says so.

        Args:
            about: facts about the prompt that all of them answer, for functions of the user's. Those that need
                a whole group get all pairs in one call, in as many times the time limit.

        Raises:
            RunError: workers cannot be started, or the pool is closed.
        """
        if pairs and task in self._own and self._fork_server.is_graded_together(task):
            groups, limit_s = [pairs], len(pairs) * self._timeout_s
            if self._network is not None:
                limit_s = longest_s(self._network, self._num_slots, len(pairs))
        else:
            groups, limit_s = [[pair] for pair in pairs], self._timeout_s
        answers = [_Answer(_line(task, group, about), limit_s, len(group)) for group in groups]
        with self._changed:
            if self._is_closed:
                raise RunError(CLOSED)
            self._waiting.extend(answers)
            self._changed.notify_all()
        return Grading(answers)

    def close(self) -> None:
        """End all processes; answers in flight fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fork_server.close()
        for thread in self._threads:
            thread.join()
        while self._waiting:
            self._waiting.popleft().done.set_exception(RunError(CLOSED))

    def _work(self) -> None:
        """Grade chunks of answers with one worker at a time; each thread of the pool runs this."""
        worker: WorkerProcess | None = None
        while chunk := self._take():
            try:
                worker = self._grade_chunk(worker, chunk)
            except Exception as error:  # no worker can be started: fail the calls that wait for these answers
                worker = None
                for answer in chunk:
                    answer.done.set_exception(error)
        if worker is not None:
            worker.close()

    def _take(self) -> deque[_Answer]:
        """Wait for answers and return a chunk for one worker; an empty one when the pool is closed.

        A larger chunk saves time, but its answers wait for each other, so it is used only while enough answers
        wait to keep all workers busy.
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
        """Settle all answers of the chunk with as many workers as it takes; return the last one if it lives."""
        num_fruitless = 0
        while chunk:
            num_left = len(chunk)
            worker = worker or self._fork_server.new_worker()
            if not self._serve(worker, chunk):
                worker.close()
                worker = None
            num_fruitless = num_fruitless + 1 if len(chunk) == num_left else 0
            if num_fruitless > MAX_FRUITLESS:
                chunk.popleft().settle(ScoringError("its workers end before they have begun it"))
                num_fruitless = 0
        return worker

    def _serve(self, worker: WorkerProcess, chunk: deque[_Answer]) -> bool:
        """Have the worker grade the chunk from the left; return False when it must not be used again."""
        if worker.has_spoken:  # its next message would count as the result of another answer
            return False
        try:
            worker.send([answer.line for answer in chunk], chunk[0].limit_s)
            while chunk:
                kind, *value = self._receive(worker, chunk)
                if kind == "ended":
                    ending, is_answers_doing, num_begun = value
                    if num_begun > worker.num_settled:  # else it died between answers, not because of one
                        chunk.popleft().settle((Overrun if is_answers_doing else ScoringError)(ending))
                    return False
                size = chunk[0].size
                if kind != "results" or len(value[0]) != size:
                    raise Garbage(f"{kind!r} instead of {size} results")
                worker.num_settled += 1
                chunk.popleft().settle(value[0])
        except Starved as error:
            chunk.popleft().settle(ScoringError(f"{self._too_long}, of which {error}"))
            return False
        except TimeoutError:
            chunk.popleft().settle(Overrun(self._too_long))
            return False
        except Garbage as error:
            chunk.popleft().settle(ScoringError(f"its worker sent {error}"))
            return False
        return worker.num_settled == worker.num_sent

    def _receive(self, worker: WorkerProcess, chunk: deque[_Answer]) -> list[Any]:
        """Return the worker's message about the chunk's first answer; if it is slow, give the others back.

        Raises:
            TimeoutError: there was no message within the time limit.
            Starved: there was none, because the worker hardly ran.
            Garbage: what came is none.
        """
        limit_s, worker.max_bytes = chunk[0].limit_s, max_bytes(chunk[0].size)
        patience_s = min(PATIENCE_S, limit_s / 2)
        with contextlib.suppress(TimeoutError):
            return worker.receive(patience_s)
        with self._changed:
            while len(chunk) > 1:
                self._waiting.appendleft(chunk.pop())
            self._changed.notify_all()
        return self._receive_slow(worker, limit_s - patience_s, limit_s)

    def _receive_slow(self, worker: WorkerProcess, left_s: float, limit_s: float) -> list[Any]:
        """Wait for a message; on a busy machine longer than `left_s`, until the worker has had some of it."""
        began = ran = worker.cpu_s()
        for _ in range(MAX_EXTENSIONS):
            with contextlib.suppress(TimeoutError):
                return worker.receive(left_s)
            before, ran = ran, worker.cpu_s()
            if ran - began >= LEAST_SHARE * limit_s:
                raise TimeoutError
            if ran - before < IDLE_SHARE * left_s and not worker.is_runnable():
                break
            left_s = limit_s / 2
        raise Starved(f"its worker ran for {max(0, ran - began):.1f} s")


def _line(task: str, pairs: Sequence[tuple[str, str]], about: About) -> bytes:
    responses, truths = zip(*pairs, strict=True)
    return json.dumps([task, responses, truths, about]).encode() + b"\n"  # escaped: breaks, surrogates
