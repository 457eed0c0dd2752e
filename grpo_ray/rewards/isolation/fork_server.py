"""The program that forks a RewardPool's workers: it has imported everything, so a new one takes milliseconds.

    python -m grpo_ray.rewards.isolation.fork_server ARGUMENTS    (JSON; standard input is a socket to the pool)

It sends ["ready", the tasks of which groups are graded together] or ["failed", why], and then receives one end
of a socket for each worker to fork. Responses bypass it: it reads none, so none can block it.
"""

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from typing import Any

from pydantic import TypeAdapter

from grpo_ray.config.reward import Reward, terms_of
from grpo_ray.rewards.configured import TermReward, uses_algebra
from grpo_ray.rewards.isolation.confinement import Confinement, die_with_parent
from grpo_ray.rewards.isolation.worker import OUT_OF_MEMORY, describe_error, serve
from grpo_ray.rewards.math.algebra import is_equal_latex
from grpo_ray.rewards.networked import NetworkReward

REWARDS: TypeAdapter[dict[str, Reward]] = TypeAdapter(dict[str, Reward])

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)

# Comparing these imports sympy and fills the tables of its parser, which builds them as it is used.
WARM_UP = [
    (r"\sqrt{8}", r"2\sqrt{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{12\pi}{5}", r"\frac{6}{5}\pi"),
    ("x=5", "5=x"), (r"\{1, x\}", r"\{x, 1\}"), ("(1, x)", "(x, 1)"), (r"x \le 2", r"2 \ge x"),
    (r"\sin x", r"\log_2 x"),
]  # fmt: skip


@dataclass(frozen=True)
class _Child:
    pid: int
    exit_fd: int  # readable once the process has ended
    channel: socket.socket  # the worker's end of the socket to the pool
    num_begun: mmap

    def kill(self) -> None:
        """Kill the worker and any processes it started, which root may do where the kernel filters no calls."""
        os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.exit_fd)
        self.channel.close()
        self.num_begun.close()


class _ForkServer:
    def __init__(
        self, control: socket.socket, rewards: Mapping[str, TermReward], confinement: Confinement
    ) -> None:
        self._control, self._rewards, self._confinement = control, rewards, confinement
        self._by_channel: dict[int, _Child] = {}
        self._by_exit: dict[int, _Child] = {}
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def run(self) -> None:
        """Fork and reap workers until the pool closes its end of `control` or is gone."""
        while True:
            fd, _ = self._poll.poll()[0]  # one at a time: handling it can make the others outdated
            if fd in self._by_exit:
                self._reap(self._by_exit[fd])
            elif fd in self._by_channel:  # the pool has hung up, because the worker took too long
                self._poll.unregister(fd)
                self._by_channel[fd].kill()
            else:
                asked, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                if not asked:
                    break
                if fds:  # otherwise too many files are open here, and the pool asks again
                    self._adopt(socket.socket(fileno=fds[0]))
        for child in self._by_exit.values():
            child.kill()
            os.waitpid(child.pid, 0)

    def _adopt(self, channel: socket.socket) -> None:
        """Fork a worker, or tell the pool why the system refuses one; the pool asks again later."""
        try:
            child = self._fork(channel)
        except OSError as error:
            _tell(channel, "refused", str(error))
            channel.close()
            return
        self._by_exit[child.exit_fd] = self._by_channel[channel.fileno()] = child
        self._poll.register(child.exit_fd, select.POLLIN)
        self._poll.register(channel, select.POLLRDHUP)

    def _fork(self, channel: socket.socket) -> _Child:
        parent, num_begun = os.getpid(), mmap(-1, 8)
        pid = os.fork()
        if pid == 0:
            try:
                die_with_parent(parent)
                self._become_worker()
                serve(channel, self._rewards, self._confinement, num_begun)
                os._exit(0)
            finally:
                os._exit(1)
        os.setpgid(pid, pid)
        try:
            return _Child(pid, os.pidfd_open(pid), channel, num_begun)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise

    def _become_worker(self) -> None:
        """Close the other workers' files, and discard all that this one prints: a full pipe would block it."""
        for child in self._by_exit.values():
            child.close()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # 0 was `control`
            os.dup2(null, fd)
        os.close(null)

    def _reap(self, child: _Child) -> None:
        """Tell the pool how the worker ended, after all of the worker's own messages."""
        child.kill()
        _, status = os.waitpid(child.pid, 0)
        del self._by_exit[child.exit_fd], self._by_channel[child.channel.fileno()]
        for fd in (child.exit_fd, child.channel.fileno()):
            with contextlib.suppress(KeyError):  # the pool had hung up
                self._poll.unregister(fd)
        _tell(child.channel, "ended", *_ending(status), int.from_bytes(child.num_begun[:], "little"))
        child.close()


def _tell(channel: socket.socket, kind: str, *values: str | bool | int) -> None:
    """Send a message if there is room: a worker that filled its channel sent garbage, which the pool sees."""
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        channel.send(json.dumps([kind, *values]).encode() + b"\n", socket.MSG_DONTWAIT)


def _ending(status: int) -> tuple[str, bool]:
    """Return how a worker ended, and whether that was its answer's doing: it was neither told to nor killed."""
    code = os.waitstatus_to_exitcode(status)
    if code == OUT_OF_MEMORY:
        return "too much memory (scorer.memory_gib)", True
    if code >= 0:
        return f"exit status {code}", False
    names = {number.value: number.name for number in signal.Signals}  # most real-time signals have none
    return names.get(-code, f"signal {-code}"), -code in CRASHES


def _main(arguments: dict[str, Any]) -> None:
    control = socket.socket(fileno=0)
    num_slots = arguments["num_slots"]
    signal.alarm(arguments["start_timeout_s"])  # in case a user's import never ends and the pool has died
    sys.path[:] = arguments["path"]
    try:
        rewards = REWARDS.validate_python(arguments["rewards"])
        terms = {task: term for task, reward in rewards.items() for term in terms_of(reward)}
        functions = {
            task: NetworkReward(term, num_slots) if num_slots else TermReward(term)
            for task, term in terms.items()
        }
        together = [task for task, function in functions.items() if function.needs_group]
        if any(map(uses_algebra, rewards.values())):
            for left, right in WARM_UP:
                is_equal_latex(left, right)
        memory_gib, readable = arguments["memory_gib"], arguments["readable_paths"]
        confinement = Confinement(memory_gib, readable, is_offline=not num_slots)
    except Exception as error:  # a user's module can raise anything
        control.sendall(json.dumps(["failed", describe_error(error)]).encode())
        return
    signal.alarm(0)
    gc.freeze()  # collecting what was imported would copy its pages into each worker
    control.sendall(json.dumps(["ready", together]).encode())
    _ForkServer(control, functions, confinement).run()


if __name__ == "__main__":
    with open(int(sys.argv[1]), encoding="utf-8") as given:
        arguments = json.load(given)
    with contextlib.suppress(BrokenPipeError):  # the pool has ended meanwhile
        _main(arguments)
