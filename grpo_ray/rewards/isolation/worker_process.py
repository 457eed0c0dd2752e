"""A RewardPool's ends of the sockets to its nursery and to its workers."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from grpo_ray.config.reward import Reward
from grpo_ray.config.secrets import reward_environment
from grpo_ray.errors import RunError

START_TIMEOUT_S = 120  # to import what grades, a user's module included
NUM_TRIES = 3
END_TIMEOUT_S = 5.0
GONE = (BrokenPipeError, ConnectionResetError)


def _too_slow() -> str:
    return f"importing took longer than {START_TIMEOUT_S} s; a module of your own must load less at its import"


class WorkerProcess:
    """One worker, by the socket to it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._received = channel, b""
        self.num_sent = self.num_settled = 0  # answers; those of them that it has told the result of

    def send(self, lines: list[bytes]) -> None:
        self.num_sent += len(lines)
        self._channel.settimeout(START_TIMEOUT_S)
        with contextlib.suppress(*GONE):  # it has ended, and that is what will be received
            self._channel.sendall(b"".join(lines))

    def receive(self, timeout_s: float) -> list[Any]:
        """Its next message.

        Raises:
            TimeoutError: there was none for `timeout_s`.
        """
        self._channel.settimeout(timeout_s)
        while b"\n" not in self._received:
            data = b""
            with contextlib.suppress(*GONE):
                data = self._channel.recv(2**16)
            if not data:
                return ["ended", "its parent has ended", 0]
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: list[Any] = json.loads(line)
        return message

    def close(self) -> None:
        """It is killed, if it lives."""
        self._channel.close()


class Nursery:
    """The process that workers are forked from: begun at once, waited for when a worker is wanted.

    It ends when its socket does, so also when this process is killed, and its workers with it.
    """

    def __init__(self, rewards: Mapping[str, Reward], memory_gib: float) -> None:
        data = TypeAdapter(dict[str, Reward]).dump_python(dict(rewards), mode="json")
        arguments = {"rewards": data, "memory_gib": memory_gib, "start_timeout_s": START_TIMEOUT_S}
        self._arguments = json.dumps({**arguments, "path": sys.path})
        self._lock = threading.Lock()
        self._is_closed = False
        self._begin()

    def new_worker(self) -> WorkerProcess:
        """
        Raises:
            RunError: there can be none, and why.
        """
        for _ in range(NUM_TRIES):
            worker = WorkerProcess(self._adopt())
            kind, *cause = worker.receive(START_TIMEOUT_S)
            if kind == "ready":
                return worker
            worker.close()
            if kind == "failed":
                break
        raise RunError(f"no worker can be started to grade (task.reward): {cause[0]}")

    def close(self) -> None:
        """End it, and with it all workers."""
        self._is_closed = True
        self._end()  # whoever waits for it goes on
        with self._lock:
            self._end()  # and one that was begun just before

    def _adopt(self) -> socket.socket:
        """The pool's end of a socket whose other end a worker has."""
        with self._lock:
            try:
                return self._fork()
            except GONE:  # somebody has killed it
                self._end()
                self._begin()
                return self._fork()

    def _fork(self) -> socket.socket:
        self._until_ready()
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        return ours

    def _begin(self) -> None:
        if self._is_closed:
            raise RunError("no worker can be started to grade: the pool is closed")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._state: list[Any] | None = None  # what it said of itself: ["ready"] or ["failed", why]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_ray.rewards.isolation.nursery", self._arguments],
                stdin=theirs.fileno(),
                stdout=2,  # what a user's module prints as it is imported
                env={**reward_environment(), "OMP_NUM_THREADS": "1"},  # workers may start no thread
                process_group=0,  # Ctrl-C is for who started the run
            )

    def _until_ready(self) -> None:
        if self._state is None:
            self._control.settimeout(START_TIMEOUT_S)
            try:
                message = self._control.recv(2**16)
                self._state = json.loads(message) if message else ["failed", self._ending()]
            except TimeoutError:
                self._state = ["failed", _too_slow()]
        kind, *cause = self._state
        if kind == "failed":
            raise RunError(f"no worker can be started to grade (task.reward): {cause[0]}")

    def _ending(self) -> str:
        status = self._process.wait()
        return _too_slow() if status == -signal.SIGALRM else f"status {status}"  # its own limit: nursery.py

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # it has been closed
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it is still importing
            self._process.kill()
            self._process.wait()
        self._control.close()
