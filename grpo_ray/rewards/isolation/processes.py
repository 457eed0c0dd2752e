"""A RewardPool's ends of the sockets to its fork server and to its workers."""

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

START_TIMEOUT_S = 120  # to import the reward functions, a user's module included
NUM_TRIES = 3
END_TIMEOUT_S = 5.0
GONE = (BrokenPipeError, ConnectionResetError)


def _too_slow() -> str:
    return f"importing took longer than {START_TIMEOUT_S} s; have your own module load less when it is imported"


class WorkerProcess:
    """One worker, at the other end of a socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel, self._received = channel, b""
        self.num_sent = self.num_settled = 0  # answers sent, and answers with a result

    def send(self, lines: list[bytes]) -> None:
        self.num_sent += len(lines)
        self._channel.settimeout(START_TIMEOUT_S)
        with contextlib.suppress(*GONE):  # it has ended, which `receive` will report
            self._channel.sendall(b"".join(lines))

    def receive(self, timeout_s: float) -> list[Any]:
        """Return the worker's next message.

        Raises:
            TimeoutError: none came within `timeout_s`.
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
        """Hang up, upon which the fork server kills the worker."""
        self._channel.close()


class ForkServer:
    """The process that workers are forked from: started at once, waited for when a worker is needed.

    It ends with its workers when its socket closes, so also when this process is killed.
    """

    def __init__(self, rewards: Mapping[str, Reward], memory_gib: float) -> None:
        data = TypeAdapter(dict[str, Reward]).dump_python(dict(rewards), mode="json")
        arguments = {"rewards": data, "memory_gib": memory_gib, "start_timeout_s": START_TIMEOUT_S}
        self._arguments = json.dumps({**arguments, "path": sys.path})
        self._lock = threading.Lock()
        self._is_closed = False
        self._begin()

    def new_worker(self) -> WorkerProcess:
        """Return a worker that is ready to grade.

        Raises:
            RunError: none can be started; the message says why.
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
        """End the fork server, and with it all workers."""
        self._is_closed = True
        self._end()  # unblocks a thread that waits for it while holding the lock
        with self._lock:
            self._end()  # ends one that such a thread has started in the meantime

    def _adopt(self) -> socket.socket:
        """Have a worker forked; return the pool's end of the socket to it."""
        with self._lock:
            try:
                return self._fork()
            except GONE:  # something killed it
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
        self._state: list[Any] | None = None  # its first message: ["ready"] or ["failed", why]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "grpo_ray.rewards.isolation.fork_server", self._arguments],
                stdin=theirs.fileno(),
                stdout=2,  # for anything that a user's module prints when it is imported
                env={**reward_environment(), "OMP_NUM_THREADS": "1"},  # workers may start no thread
                process_group=0,  # Ctrl-C is for the process that started the run
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
        return _too_slow() if status == -signal.SIGALRM else f"status {status}"  # fork_server.py sets the alarm

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # already closed
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it is still importing
            self._process.kill()
            self._process.wait()
        self._control.close()
