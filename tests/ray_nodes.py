"""Ray nodes on this machine, started by the launch scripts, with ports and folders of their own."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
from run_process import wait_until

AGENT_PORTS = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port")


def free_port() -> int:
    """Return a port below those of clients, one of which could be given it before a node that starts slowly."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", 20_000 + secrets.randbelow(12_000)))
            return int(listener.getsockname()[1])


def token_environment() -> dict[str, str]:
    """Return this process's environment with a fresh token, and with this Python's programs first."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_AUTH_MODE": "token"}


@contextlib.contextmanager
def ray_node(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the launch scripts; the node ends with the block, and nothing of it stays.

    Every port is its own. Paths are short: Ray's sockets lie there, with names of up to 107 characters.
    """
    folder = tempfile.mkdtemp(prefix="gr", dir="/tmp")
    ports = [f"--{port}={free_port()}" for port in AGENT_PORTS]
    process = subprocess.Popen(
        ["bash", *command, "--block", f"--temp-dir={folder}", *ports],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        _end_with_children(process)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_head(environment: dict[str, str], *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a head node; gives its process and its address, which answers."""
    port = free_port()
    address, ports = f"127.0.0.1:{port}", [f"--port={port}", f"--ray-client-server-port={free_port()}"]
    with ray_node(["launch/start_head.sh", *ports, *options], environment) as process:
        wait_until(process, lambda: _answers(address))
        yield process, address


def _answers(address: str) -> bool:
    place = "127.0.0.1", int(address.partition(":")[2])
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=1):
        return True
    return False


def _end_with_children(process: subprocess.Popen[bytes]) -> None:
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(family, timeout=3)  # some workers of Ray never end by themselves
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
