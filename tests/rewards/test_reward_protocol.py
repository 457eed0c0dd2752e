"""Workers that were taken over by an answer, and systems that refuse a process: neither ends a run."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from hostile_rewards import FORGERIES

from grpo_ray.errors import RunError
from grpo_ray.rewards import REWARDS
from grpo_ray.rewards.base import NotGraded, Result, ScoringError, Ungradable
from grpo_ray.rewards.builtin import keyword_inclusion_reward_fn
from grpo_ray.rewards.isolation import processes
from grpo_ray.rewards.isolation.messages import Garbage, read_message
from grpo_ray.rewards.isolation.pool import RewardPool
from grpo_ray.rewards.isolation.processes import WorkerProcess

NOBODY = 65534
slow = pytest.mark.slow
RIGHT = ["72"] * 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """Share a pool of one worker, so that each answer meets what the previous one left behind."""
    pool = RewardPool({"own": "hostile_rewards:obey"}, num_workers=1, timeout_s=1.0, memory_gib=0.25)
    pool.start()
    yield pool
    pool.close()


def grade(pool: RewardPool, *responses: str) -> list[Result]:
    return pool.submit("own", [(response, "72") for response in responses]).result()


def are_right(results: list[Result]) -> bool:
    return all(isinstance(result, dict) and result["reward"] == 1 for result in results)


# ---- what a worker sends ----


@slow
@pytest.mark.parametrize("word", ["flood", "fill", "forge-no-json", "forge-ready"])
def test_garbage_is_an_error_of_its_answer_alone(pool: RewardPool, word: str) -> None:
    garbage, *others = grade(pool, f"{word} 72", *RIGHT)
    assert isinstance(garbage, ScoringError)
    assert "its worker sent " in str(garbage)
    assert len(str(garbage)) < 700
    assert are_right(others)


@slow
def test_a_worker_that_fills_its_channel_and_ends_later_blocks_nothing(pool: RewardPool) -> None:
    assert are_right(grade(pool, "fill-later 72"))
    fork_server = psutil.Process(pool._fork_server._process.pid)
    assert psutil.wait_procs(fork_server.children(), timeout=600)[1] == []
    assert are_right(grade(pool, *RIGHT))


@slow
def test_a_second_verdict_is_not_the_next_answers(pool: RewardPool) -> None:
    grade(pool, "forge-right 71")  # the worker sends its own verdict afterwards
    time.sleep(1)  # until that has arrived; before, it would count for the next answer: docs/threats.md
    (wrong,) = grade(pool, "71")
    assert wrong["reward"] == 0
    (forged,) = grade(pool, "forge-right 71")
    assert are_right([forged])  # its own verdict can be forged: docs/threats.md
    time.sleep(1)  # as above
    assert are_right(grade(pool, "72"))


@slow
def test_a_worker_that_takes_no_more_answers_is_ended_in_time(pool: RewardPool) -> None:
    assert are_right(grade(pool, "deaf-later 72"))
    time.sleep(1.5)
    (result,) = grade(pool, "72" + " " * 2_000_000)  # more than the socket holds
    assert str(result) == "longer than 1 s (scorer.timeout_s)"
    assert are_right(grade(pool, *RIGHT))


@slow
def test_workers_that_end_before_they_begin_are_an_error_and_no_exception(pool: RewardPool) -> None:
    forgotten, *others = grade(pool, "forget 72", *RIGHT)
    assert (type(forgotten), str(forgotten)) == (ScoringError, "its workers end before they have begun it")
    assert are_right(others)


@slow
def test_a_signal_without_a_name_ends_one_worker_and_not_the_fork_server(pool: RewardPool) -> None:
    process = pool._fork_server._process
    error, *others = grade(pool, "real-time-signal 72", *RIGHT)
    assert (type(error), str(error)) == (ScoringError, "signal 35")
    assert are_right(others)
    assert pool._fork_server._process is process


@pytest.mark.parametrize("line", FORGERIES.values(), ids=FORGERIES)
def test_only_the_exact_form_is_a_message(line: bytes) -> None:
    if line in (FORGERIES["ready"], FORGERIES["failed"]):
        assert read_message(line)[0] in ("ready", "failed")  # well-formed; test_garbage_... sends it too late
        return
    with pytest.raises(Garbage) as error:
        read_message(line)
    assert len(str(error.value)) < 600


def test_a_message_is_read_as_sent() -> None:
    scores = {"reward": -2, "format_reward": 1, "answer_reward": 0}
    said = ["results", [["scores", scores], ["error", "\ud800 \ud800"]]]
    kind, (found, error) = read_message(json.dumps(said).encode())
    assert (kind, found, str(error)) == ("results", scores, "? ?")  # no file can hold lone surrogates
    assert read_message(b'["ended", "SIGKILL", false, 3]') == ["ended", "SIGKILL", False, 3]


@slow
def test_waiting_for_a_message_has_a_deadline_and_a_limit_of_bytes() -> None:
    ours, theirs = socket.socketpair()
    worker, stop = WorkerProcess(ours), threading.Event()

    def drip() -> None:
        while not stop.wait(0.05):
            theirs.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        worker.receive(0.4)
    stop.set()
    thread.join()
    theirs.sendall(b"x" * 2**16)
    with pytest.raises(Garbage, match="more than 65536 bytes without a line break"):
        worker.receive(5)
    with pytest.raises(TimeoutError):
        worker.send([b"x" * 10_000_000], 0.2)
    theirs.close()
    worker.close()


# ---- a system that refuses a process or a file ----


REFUSED_FORKS = """
import os, resource, signal, socket, sys
from grpo_ray.rewards.isolation.confinement import Confinement
from grpo_ray.rewards.isolation.fork_server import _ForkServer
os.setgid({nobody})
os.setuid({nobody})
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, most))
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_NPROC, (most, most)))
_ForkServer(socket.socket(fileno=int(sys.argv[1])), {{}}, Confinement(0.25)).run()
"""


@slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only another user than root has a limit of processes")
def test_a_fork_that_the_system_refuses_is_told_and_succeeds_later() -> None:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", REFUSED_FORKS.format(nobody=NOBODY), str(theirs.fileno())]
    fork_server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()

    def ask() -> list[Any]:
        ours, channel = socket.socketpair()
        with channel:
            socket.send_fds(control, [b"+"], [channel.fileno()])
        worker = WorkerProcess(ours)
        message = worker.receive(30)
        worker.close()
        return message

    for _ in range(3):
        kind, why, *_ = ask()
        assert (kind, "temporarily unavailable" in why) == ("refused", True), why
    fork_server.send_signal(signal.SIGUSR1)
    answers = (ask()[0] for _ in range(10))  # the signal comes on its own way, perhaps after the next request
    assert "ready" in answers
    control.close()
    assert fork_server.wait(30) == 0


@slow
def test_a_refusal_that_lasts_is_an_error_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PAUSES_S", (0.01, 0.02))
    pool = RewardPool({"own": "hostile_rewards:obey"}, num_workers=1, timeout_s=1.0, memory_gib=0.25)
    pool.start()
    asked = []

    def refuse() -> tuple[socket.socket, socket.socket]:
        asked.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(processes.socket, "socketpair", refuse)
        message = r"the system has refused another process or file \(.*Too many open files"
        with pytest.raises(RunError, match=message):
            grade(pool, "72")
    assert len(asked) == 3
    assert are_right(grade(pool, "72"))
    pool.close()


@slow
def test_a_fork_server_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    start = processes.subprocess.Popen

    def refuse_twice(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(processes.subprocess, "Popen", refuse_twice)
    pool = RewardPool({"own": "hostile_rewards:obey"}, num_workers=1, timeout_s=30.0, memory_gib=0.25)
    assert are_right(pool.submit("own", [("72", "72")]).result())
    assert len(tries) == 3
    pool.close()


N = 100_000
MARKS = "\u0f73\u0316\u0301"  # sorted by class when composed, which takes quadratic time in a row

# By name: a response of about n characters, and whether it goes between the answer tags.
HOSTILE: dict[str, Callable[[int], str]] = {
    "boxes in boxes": lambda n: r"\boxed{" * (n // 8) + "}" * (n // 8),
    "boxes and spaces": lambda n: r"\boxed{ " * (n // 10) + " }" * (n // 10),
    "boxes that stay open": lambda n: r"\boxed{" * (n // 7),
    "boxes side by side": lambda n: r"\boxed{1}" * (n // 9),
    "braces": lambda n: r"\boxed{" + "{" * (n // 2) + "}" * (n // 2) + "}",
    "backslashes": lambda n: r"\boxed{" + "\\" * n + "}",
    "marks": lambda n: "a" + MARKS * (n // 3),
    "marks in order": lambda n: "a" + "\u0301" * (n // 2) + "\u0316" * (n // 2),
    "spaces": lambda n: "cat" + " " * n + "x",
    "words": lambda n: "New " * (n // 4),
    "digits": lambda n: "1" * n + "x",
    "numbers": lambda n: "1 , " * (n // 4) + "x",
    "numbers and spaces": lambda n: ("1" + " " * 100) * (n // 101) + "x",
    "commas": lambda n: "1" + " ,; " * (n // 4) + "1",
    "tags": lambda n: "</think> <answer> " * (n // 18),
    "brackets": lambda n: "(" * n,
    "one line": lambda n: "\ud800\u2028" * (n // 2),
}
TRUTHS = {"keyword_inclusion": "cat, new york", "sort_distance": "3 1 2"}
# The others read an answer in the same way, and judge what is short.
WHOLE = ("keyword_inclusion", "last_number", "question_only")  # to these, tags are text like any other
SCANNING = ("exact_match", "sort_distance", *WHOLE)


def seconds_of(function: Callable[[str, str], object], response: str, truth: str) -> float:
    """Return the CPU time of this thread."""
    started = time.thread_time()
    with contextlib.suppress(NotGraded, Ungradable):
        function(response, truth)
    return time.thread_time() - started


@pytest.mark.slow
@pytest.mark.parametrize("name", SCANNING)
@pytest.mark.parametrize("kind", HOSTILE)
def test_time_grows_with_the_length_alone(name: str, kind: str) -> None:
    truth = TRUTHS.get(name, "72")

    def is_linear(wrap: str) -> bool:
        texts = (wrap.format(HOSTILE[kind](n)) for n in (N, 4 * N))
        small, large = (seconds_of(REWARDS[name], text, truth) for text in texts)
        return large < 9 * small + 0.02  # quadratic: 16 times

    for wrap in ["{}", "so </think> <answer> {} </answer>"][: 1 if name in WHOLE else 2]:
        assert is_linear(wrap) or is_linear(wrap)  # a busy machine may disturb one try


def test_marks_in_a_row_are_the_same_word_as_before() -> None:
    assert keyword_inclusion_reward_fn("Cafe\u0301", "café")["reward"] == 1
    assert keyword_inclusion_reward_fn("caf" + unicodedata.normalize("NFD", "é"), "café")["reward"] == 1
    accents = "e" + "\u0301" * 40
    assert keyword_inclusion_reward_fn(f"a {accents} b", accents)["reward"] == 1
