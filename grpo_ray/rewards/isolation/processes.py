"""A RewardPool's ends of the sockets to its fork server and to its workers."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from pydantic import TypeAdapter

from grpo_ray.config.reward import Reward, secrets_in
from grpo_ray.config.secrets import reward_environment
from grpo_ray.errors import IN_GRADER, RunError
from grpo_ray.rewards.isolation.messages import MAX_BYTES, Garbage, read_message

PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 8)  # between tries to fork that the system refused
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
        self.pid: int | None = None  # known once it is ready
        self.max_bytes = MAX_BYTES  # of its next message

    def send(self, lines: list[bytes], timeout_s: float) -> None:
        """Send the lines.

        Raises:
            TimeoutError: the worker did not take them within `timeout_s`.
        """
        self.num_sent += len(lines)
        self._channel.settimeout(timeout_s)
        with contextlib.suppress(*GONE):  # it has ended, which `receive` will report
            self._channel.sendall(b"".join(lines))

    def receive(self, timeout_s: float) -> list[Any]:
        """Return the worker's next message.

        Raises:
            TimeoutError: there was no whole message within `timeout_s`, however many bytes came.
            Garbage: it sent something else, or too much.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > self.max_bytes:
                raise Garbage(f"more than {self.max_bytes} bytes without a line break")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._channel.settimeout(left_s)
            data = b""
            with contextlib.suppress(*GONE):
                data = self._channel.recv(MAX_BYTES)
            if not data:
                return ["ended", "its parent has ended", False, 0]
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return read_message(line)

    @property
    def has_spoken(self) -> bool:
        """True if the worker sent something that it was not asked for."""
        self._channel.settimeout(0)
        with contextlib.suppress(BlockingIOError, *GONE):
            return bool(self._received or self._channel.recv(1, socket.MSG_PEEK))
        return False

    def cpu_s(self) -> float:
        """Return the seconds of processor time that the worker has had; 0 when it has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return float(times.user + times.system)

    def is_runnable(self) -> bool:
        """Return True if the worker would run if it had a processor: it neither sleeps nor is stopped."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_RUNNING)
        except psutil.NoSuchProcess:
            return False

    def close(self) -> None:
        """Hang up, upon which the fork server kills the worker."""
        self._channel.close()


class ForkServer:
    """The process that workers are forked from: started at once, waited for when a worker is needed.

    It ends with its workers when its socket closes, so also when this process is killed.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], memory_gib: float, readable_paths: Sequence[str] = (),
        num_slots: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            num_slots: calls at the same time of the only reward, which has the network; 0: none has it.
        """
        data = TypeAdapter(dict[str, Reward]).dump_python(dict(rewards), mode="json")
        limits = {"memory_gib": memory_gib, "start_timeout_s": START_TIMEOUT_S, "num_slots": num_slots}
        given = {"rewards": data, "readable_paths": [*readable_paths], "path": sys.path}
        self._arguments = json.dumps({**limits, **given})
        environment = reward_environment(secrets_in(rewards.values()))
        # Workers may start no thread, and sets have the same order in each.
        self._environment = {**environment, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", IN_GRADER: "1"}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._together: list[str] | None = None  # tasks of which a group's answers are graded in one call
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # `new_worker` tries again
            self._begin()

    def new_worker(self) -> WorkerProcess:
        """Return a worker that is ready to grade; if the system refuses it, try again for a while.

        Raises:
            RunError: none can be started; the message says why.
        """
        num_tries, pauses_s = NUM_TRIES, iter(PAUSES_S)
        while True:
            worker, kind, cause = self._try()
            if worker is not None:
                return worker
            num_tries -= kind == "ended"
            pause_s = next(pauses_s, None) if kind == "refused" else 0.0
            if kind == "failed" or not num_tries:
                raise RunError(f"no worker can be started to grade (task.reward): {cause}")
            if pause_s is None:
                raise RunError(
                    f"no worker can be started to grade: for {sum(PAUSES_S):.0f} s the system has refused "
                    f"another process or file ({cause}). Raise its limits (ulimit -u, ulimit -n, the cgroup's "
                    "pids.max or memory.max), or lower scorer.num_workers"
                )
            self._closed.wait(pause_s)

    def _try(self) -> tuple[WorkerProcess | None, str, str]:
        """Return a worker, or what kept it from being ready: its last message's kind and cause."""
        try:
            channel, server = self._adopt()
            worker = WorkerProcess(channel)
        except OSError as error:  # too many open files, processes or too little memory, here or there
            return None, "refused", str(error)
        try:
            kind, *cause = worker.receive(START_TIMEOUT_S)
        except (TimeoutError, Garbage):
            kind, cause = "ended", [f"it was not ready within {START_TIMEOUT_S} s"]
            with self._lock:
                if self._process is server:  # it may hang; the next worker comes from another
                    self._end(0.0)
        if kind == "ready":
            (worker.pid,) = cause
            return worker, kind, ""
        worker.close()
        return None, kind, cause[0]

    def close(self) -> None:
        """End the fork server, and with it all workers."""
        self._closed.set()
        self._end()  # unblocks a thread that waits for it while holding the lock
        with self._lock:
            self._end()  # ends one that such a thread has started in the meantime

    def _adopt(self) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
        """Have a worker forked; return the pool's end of the socket to it, and the process that forked it."""
        with self._lock:
            if self._process is None:  # it could not be started, or was killed
                self._begin()
            try:
                return self._fork(), self._process
            except GONE:  # something killed it
                self._end()
                self._begin()
                return self._fork(), self._process

    def _fork(self) -> socket.socket:
        self._until_ready()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"+"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        return ours

    def _begin(self) -> None:
        if self._closed.is_set():
            raise RunError("no worker can be started to grade: the pool is closed")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._state: list[Any] | None = None  # its first message: ["ready", tasks] or ["failed", why]
        try:
            # A file has room for all arguments; a command line has 128 KiB.
            with theirs, open(os.memfd_create("arguments"), "w+", encoding="utf-8") as file:
                file.write(self._arguments)
                file.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "grpo_ray.rewards.isolation.fork_server", str(file.fileno())],
                    stdin=theirs.fileno(),
                    stdout=2,  # for anything that a user's module prints when it is imported
                    env=self._environment,
                    pass_fds=[file.fileno()],
                    process_group=0,  # Ctrl-C is for the process that started the run
                )
        except OSError:
            self._control.close()
            raise

    def is_graded_together(self, task: str) -> bool:
        """Return True if the task's reward needs all responses of a group; waits until this is known.

        Raises:
            RunError: no worker can be started.
        """
        if self._together is None:
            self.new_worker().close()
        assert self._together is not None
        return task in self._together

    def _until_ready(self) -> None:
        if self._state is None:
            self._control.settimeout(START_TIMEOUT_S + END_TIMEOUT_S)  # longer than its own alarm
            try:
                message = self._control.recv(2**16)
                self._state = json.loads(message) if message else ["failed", self._ending()]
            except TimeoutError:  # it hangs
                self._state = ["failed", _too_slow()]
                self._end(0.0)
        kind, detail = self._state
        if kind == "failed":
            raise RunError(f"no worker can be started to grade (task.reward): {detail}")
        self._together = detail

    def _ending(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        return _too_slow() if status == -signal.SIGALRM else f"status {status}"  # fork_server.py sets the alarm

    def _end(self, timeout_s: float = END_TIMEOUT_S) -> None:
        """Hang up, and kill the fork server unless that ends it within `timeout_s`."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):  # already closed
            self._control.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:  # it is still importing, or hangs
            process.kill()
            process.wait()
        self._control.close()
        self._process = None
