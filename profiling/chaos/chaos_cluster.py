"""A Ray cluster of several nodes on this machine, which can be lost and join again."""

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

RAY = str(Path(sys.executable).with_name("ray"))
QUICK = {  # a lost node is noticed in seconds
    "RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000", "RAY_health_check_failure_threshold": "3",
}  # fmt: skip
OBJECT_STORE = str(300 * 2**20)


class Cluster:
    """A head node, where the driver runs, and further nodes, each with room for every actor.

    Their processes have the driver's `environment`, and more.
    """

    def __init__(self, num_nodes: int, environment: Mapping[str, str]) -> None:
        token = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": "token"}
        self._address = f"127.0.0.1:{_free_port()}"
        self._folders: list[str] = []
        self._environment = {**environment, **token, **QUICK}
        self.environment = {**token, "RAY_ADDRESS": self._address}
        self.num_nodes = num_nodes
        self.start()

    def start(self) -> None:
        """Start the head and the further nodes, at the same address again after `stop`."""
        port = self._address.partition(":")[2]
        self._head = self._start("--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=0")
        self._nodes: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + 60
        while not _answers(self._address):
            if self._head.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("the head node did not come up")
            time.sleep(0.2)
        self._nodes = [self._join() for _ in range(self.num_nodes)]

    def hosts(self, process: psutil.Process) -> int | None:
        """Return the number of the further node that a process belongs to; None: the head's."""
        ancestors = {parent.pid for parent in process.parents()}
        return next((i for i, node in enumerate(self._nodes) if node.pid in ancestors), None)

    def lose(self, index: int) -> None:
        """Kill a node with everything on it, as if its power were cut."""
        _kill(self._nodes[index])

    def lose_head(self) -> None:
        """Kill all of Ray on the head node; the driver there is a process of its own."""
        _kill(self._head)

    def rejoin(self, index: int) -> None:
        self._nodes[index] = self._join()

    def stop(self) -> None:
        for node in [*self._nodes, self._head]:
            if node.poll() is None:
                _kill(node)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _join(self) -> subprocess.Popen[bytes]:
        return self._start(f"--address={self._address}", "--num-cpus=1")

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        folder = tempfile.mkdtemp(prefix="gr", dir="/tmp")  # short, because sockets lie in it
        self._folders.append(folder)
        ports = [f"--dashboard-agent-listen-port={_free_port()}", f"--dashboard-agent-grpc-port={_free_port()}"]
        return subprocess.Popen(
            [RAY, "start", *options, *ports, "--block", "--disable-usage-stats",
             f"--temp-dir={folder}", f"--object-store-memory={OBJECT_STORE}"],
            env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


def _kill(node: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a node."""
    for process in [*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)]:
        process.kill()
    node.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _answers(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
