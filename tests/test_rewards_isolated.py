"""Grading in a process that can die, and can do nothing but grade."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_ray.rewards import make_reward_fn
from grpo_ray.rewards.isolated import IsolatedReward, ScoringError
from grpo_ray.rewards.r1_zero import r1_zero_reward_fn

ENDLESS = r"\binom{1000000000}{500000000}"


def response(answer: str) -> str:
    return f" thinking </think> <answer> {answer} </answer>"


@pytest.fixture
def reward():
    isolated = make_reward_fn("r1_zero", timeout_s=1.5, memory_gib=2)
    assert isinstance(isolated, IsolatedReward)
    yield isolated
    isolated.close()


def worker_of(reward: IsolatedReward) -> psutil.Process:
    assert reward(response("72"), "72")["reward"] == 1
    assert reward._worker is not None
    return psutil.Process(reward._worker.pid)


def test_verdicts_are_those_of_the_function_itself(reward):
    for answer, truth in [("72", "72"), ("0.5", r"\frac{1}{2}"), ("71", "72"), ("line\nbreak ü", "72")]:
        assert reward(response(answer), truth) == r1_zero_reward_fn(response(answer), truth)


@pytest.mark.parametrize("answer", [ENDLESS, r"((10^{999})^{999})^{999}"])
def test_an_endless_answer_is_an_error_and_the_next_one_is_graded(reward, answer):
    assert reward(response("72"), "72")["reward"] == 1
    with pytest.raises(ScoringError):
        reward(response(answer), "72")
    assert reward(response("72"), "72")["reward"] == 1


@pytest.mark.parametrize(
    "answer",
    [
        "9" * 100_000,
        "(" * 100_000,
        "[" * 50_000 + "]" * 50_000,
        "{" * 900 + "}" * 900,
        "\ud800\x00\r\n\u2028" * 9_999,
    ],
)
def test_long_deep_and_odd_answers_are_one_line_each(reward, answer):
    pid = worker_of(reward).pid
    for text in (response(answer), answer):
        assert reward(text, "72") == r1_zero_reward_fn(text, "72")
    assert worker_of(reward).pid == pid  # no answer took the worker with it


def test_a_worker_that_died_between_answers_costs_none(reward):
    worker = worker_of(reward)
    worker.kill()
    while worker.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert worker_of(reward).pid != worker.pid


def test_close_ends_the_worker(reward):
    worker = worker_of(reward)
    reward.close()
    assert not worker.is_running()


PARENT = f"""
from grpo_ray.rewards.isolated import IsolatedReward
reward = IsolatedReward("r1_zero", timeout_s=120, memory_gib=2)
reward(" a </think> <answer> 72 </answer>", "72")
print(reward._worker.pid, flush=True)
reward({response(ENDLESS)!r}, "72")
"""


def test_a_killed_parent_leaves_no_worker_even_amid_a_computation():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    before = worker.cpu_times().user
    while worker.cpu_times().user < before + 0.5:  # it computes, and so would not see its input end
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    worker.wait(timeout=10)


def test_a_worker_whose_parent_is_gone_already_does_not_start():
    command = [
        sys.executable,
        "-m",
        "grpo_ray.rewards.worker",
        "r1_zero",
        "1",
        "2",
        "1",
    ]  # nobody's parent is 1
    result = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "gone" in result.stderr


def test_the_worker_inherits_no_secret(reward, monkeypatch):
    monkeypatch.setenv("EXAMPLE_TOKEN", "for the Scorer alone")
    monkeypatch.setenv("SOMETHING", "else")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    environment = worker_of(reward).environ()
    assert environment["LC_ALL"] == "C.UTF-8"
    assert environment["PATH"] == os.environ["PATH"]
    assert not {"EXAMPLE_TOKEN", "SOMETHING"} & environment.keys()


# What an answer that got to run code in the worker would try; prints what succeeded.
ATTEMPTS = """
import os, pathlib, socket, subprocess, sys
from grpo_ray.rewards.confinement import drop_capabilities, enter_sandbox, limit_resources
listener = socket.create_server(("127.0.0.1", 0))
victim = pathlib.Path(sys.argv[1])
attempts = {
    "write": lambda: (victim.parent / "new").write_text("x"),
    "truncate": lambda: os.truncate(victim, 0),
    "remove": victim.unlink,
    "make a folder": lambda: (victim.parent / "folder").mkdir(),
    "execute": lambda: subprocess.run(["/bin/true"], check=True),
    "connect": lambda: socket.create_connection(listener.getsockname(), timeout=5),
    "read a parent's environment": lambda: open(f"/proc/{os.getppid()}/environ").read(),
    "signal": lambda: os.kill(os.getppid(), 0),
    "allocate": lambda: bytearray(3 * 2**30),
}
limit_resources(memory_gib=2)
drop_capabilities()
assert enter_sandbox() or sys.exit("no Landlock")
assert victim.read_text() == "kept"
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError):
        continue
    print(name)
"""


def test_the_worker_can_neither_write_nor_run_nor_reach_anything(tmp_path):
    victim = tmp_path / "file"
    victim.write_text("kept")
    command = [sys.executable, "-c", ATTEMPTS, str(victim)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "no Landlock" in result.stderr:
        pytest.skip("this kernel has no Landlock")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert victim.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [victim]


def test_the_worker_confines_itself(reward):
    worker = worker_of(reward)
    status = Path(f"/proc/{worker.pid}/status").read_text().split()
    assert status[status.index("NoNewPrivs:") + 1] == "1"
    for limit, expected in {
        psutil.RLIMIT_AS: 2 * 2**30, psutil.RLIMIT_FSIZE: 0, psutil.RLIMIT_CORE: 0, psutil.RLIMIT_NPROC: 0,
    }.items():  # fmt: skip
        assert worker.rlimit(limit) == (expected, expected)
