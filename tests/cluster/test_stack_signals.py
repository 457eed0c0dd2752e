"""Signals that ask a process for its stacks, or end it: to the right process, or to none."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from grpo_ray.cluster.hosting import ServingGroup
from grpo_ray.cluster.reaper import kill_if_left, process_at, send_signal

TELLS = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("signalled", flush=True))
print("up", flush=True)
for line in sys.stdin: pass
"""


@pytest.fixture
def process() -> Iterator["subprocess.Popen[str]"]:
    """A process that says when it gets SIGUSR1."""
    command, pipe = [sys.executable, "-c", TELLS], subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert started.stdout.readline() == "up\n"
    yield started
    started.kill()
    started.communicate()


@pytest.mark.slow
def test_the_process_is_signalled_and_no_other_that_has_its_pid(process: "subprocess.Popen[str]") -> None:
    """SIGUSR1 ends a process that does not expect it; a pid may be reused after its actor has died."""
    for _ in range(2):
        send_signal((process.pid, "12345"))
        time.sleep(0.2)
    send_signal(process_at(process.pid))
    assert process.stdout.readline() == "signalled\n"
    assert process.communicate("")[0] == ""  # once


def test_a_process_that_is_gone_or_another_users_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    send_signal((2**22 - 7, "1"))
    monkeypatch.setattr(signal, "pidfd_send_signal", Mock(side_effect=PermissionError))
    send_signal(process_at(os.getpid()))


@pytest.mark.slow
def test_a_killed_actor_that_is_stopped_does_not_stay(
    group: Any, tmp_path: Path, process: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives up a process to which it cannot connect; here it does nothing at all."""
    process.send_signal(signal.SIGSTOP)
    found = process_at(process.pid)
    (tmp_path / "a.pid").write_text(f"n1 {found[0]} {found[1]}")
    (tmp_path / "b.pid").write_text("ab" * 28 + " 77 5")
    asked: list[str] = []
    monkeypatch.setattr(ray, "kill", asked.append)
    group.by_name = lambda: {name: SimpleNamespace(handle=name) for name in "abc"}
    for name in "abc":
        ServingGroup._kill(group, name)
    assert asked == ["a", "b", "c"]
    assert process.wait(60) == -signal.SIGKILL
    assert group.elsewhere == [("ab" * 28, False, (77, "5"))]


def test_a_process_that_ends_by_itself_is_not_killed(process: "subprocess.Popen[str]") -> None:
    found = process_at(process.pid)
    process.communicate("")
    began = time.monotonic()
    kill_if_left(found, 60.0)
    kill_if_left((os.getpid(), "12345"), 0.0)  # another process has its pid
    assert time.monotonic() - began < 30
    assert process.returncode == 0


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A ServingGroup without Ray, with the actors `a` to `d` on node n1; `sent` has the signals."""
    actors: Any = SimpleNamespace(_ending=[], _run=SimpleNamespace(logs=tmp_path), sent=[], elsewhere=[])
    actors.by_name = lambda: dict.fromkeys("abcd")
    actors._reach = partial(ServingGroup._reach, actors)
    actors._kill_later = partial(ServingGroup._kill_later, actors)

    class Task:
        def __init__(self, function: Callable[..., None]) -> None: ...

        def options(self, **options: Any) -> Any:
            strategy = options["scheduling_strategy"]
            return SimpleNamespace(
                remote=lambda process: actors.elsewhere.append((strategy.node_id, strategy.soft, process))
            )

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n1"))
    monkeypatch.setattr(ray, "remote", Task)
    monkeypatch.setattr("grpo_ray.cluster.hosting.send_signal", actors.sent.append)
    return actors


@pytest.mark.parametrize("damage", ["", "n1 pid 5"])
def test_each_process_is_signalled_on_its_own_node_whatever_is_in_others_pid_files(
    group: Any, tmp_path: Path, damage: str
) -> None:
    """A full disk leaves an empty one. If a node is gone, its pid belongs to a stranger on every other one."""
    (tmp_path / "a.pid").write_text(damage)
    (tmp_path / "b.pid").mkdir()
    (tmp_path / "c.pid").write_text("n1 77 5")
    (tmp_path / "d.pid").write_text("ab" * 28 + " 77 5")
    ServingGroup.dump_stacks(group)
    assert group.sent == [(77, "5")]
    assert group.elsewhere == [("ab" * 28, False, (77, "5"))]


def test_generators_that_are_up_shut_down_whatever_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Generator that is being replaced must not cost the others' engines their clean end."""
    names = [f"generator-{i}" for i in range(4)]
    shut_down, killed = [], []

    def client(name: str) -> Any:
        probe = SimpleNamespace(remote=lambda: name)
        shutdown = SimpleNamespace(remote=lambda: shut_down.append(name))
        return SimpleNamespace(handle=SimpleNamespace(name=name, take_stats=probe, shutdown=shutdown))

    clients = {name: client(name) for name in names}
    group = SimpleNamespace(
        generators=dict.fromkeys(names), teachers={}, environments={}, by_name=lambda: clients,
        _ending=[], _kill=killed.append,
    )  # fmt: skip
    hung, up = names[:1], names[1:]
    monkeypatch.setattr(ray, "wait", lambda probes, **_: (up, hung))
    monkeypatch.setattr(ray, "get", lambda *_, **__: None)
    ServingGroup.stop(group)  # type: ignore[arg-type]
    assert (shut_down, killed) == (up, names)
