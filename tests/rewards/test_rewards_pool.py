"""Grading in processes that may die, be taken over by an answer or be refused, and can do nothing but grade."""

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import psutil
import pytest
from builders import respond
from hostile_rewards import DEADLY, ENDLESS, HARMLESS, RAISING, UNGRADABLE
from run_process import until

from grpo_ray.config.reward import ScorerConfig
from grpo_ray.config.secrets import reward_environment
from grpo_ray.errors import RunError
from grpo_ray.rewards import REWARDS
from grpo_ray.rewards.base import NotGraded, Overrun, Result, ScoringError, Ungradable, verdict
from grpo_ray.rewards.builtin import r1_zero_reward_fn
from grpo_ray.rewards.configured import tried
from grpo_ray.rewards.grader import Grader
from grpo_ray.rewards.isolation import processes
from grpo_ray.rewards.isolation.confinement import die_with_parent, protection_here
from grpo_ray.rewards.isolation.messages import Garbage
from grpo_ray.rewards.isolation.pool import RewardPool, _Answer
from grpo_ray.rewards.isolation.processes import WorkerProcess
from grpo_ray.rewards.isolation.worker import result_of

pytestmark = pytest.mark.slow  # workers are started, killed and waited for
OWN = "hostile_rewards:obey"
TIMEOUT_S, MEMORY_GIB = 0.5, 0.25
NOBODY = 65534
RIGHT = ["72"] * 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """Share a pool of two workers, and its fork server, between all tests.

    Its limits are of processor time: on a busy machine no answer takes too long that would not on an idle one.
    """
    rewards = {"maths": "r1_zero", "own": OWN}
    with pytest.MonkeyPatch.context() as patch, closing(RewardPool(rewards, 2, TIMEOUT_S, MEMORY_GIB)) as pool:
        patch.setattr("grpo_ray.rewards.isolation.pool.LEAST_SHARE", 0.9)
        patch.setattr("grpo_ray.rewards.isolation.pool.MAX_EXTENSIONS", 1000)
        yield pool


def pool_of(num_workers: int, timeout_s: float = 60.0) -> closing[RewardPool]:
    return closing(RewardPool({"own": OWN}, num_workers, timeout_s, MEMORY_GIB))


def grade(pool: RewardPool, *responses: str) -> list[Result]:
    return pool.submit("own", [(response, "72") for response in responses]).result()


def are_right(results: list[Result]) -> bool:
    return all(isinstance(result, dict) and result["reward"] == 1 for result in results)


def obeyed(pool: RewardPool, *responses: str) -> list[Any]:
    """Return 1 or 0 for each graded response, and for others the reason why they have no grade."""
    results = grade(pool, *responses)
    return [result["reward"] if isinstance(result, dict) else str(result) for result in results]


def kind_of(result: Result) -> str:
    return {Ungradable: "ungradable", Overrun: "ungradable", ScoringError: "error"}.get(type(result), "graded")


def fork_server_of(pool: RewardPool) -> psutil.Process:
    return psutil.Process(pool._fork_server._process.pid)


def workers_of(pool: RewardPool) -> list[psutil.Process]:
    """Return both workers: neither can take two answers while the other has none."""
    assert obeyed(pool, *["nap 72"] * 2) == [1] * 2
    until(lambda: len(fork_server_of(pool).children()) <= 2)  # one of an earlier test may still be ending
    return fork_server_of(pool).children()


# ---- verdicts ----


def test_verdicts_are_those_of_the_function_itself(pool: RewardPool) -> None:
    pairs = [
        *[("72", "72"), ("0.5", r"\frac{1}{2}"), ("71", "72"), ("line\nbreak ü", "72"), ("", "72")],
        *[("9" * 100_000, "72"), ("(" * 100_000, "72"), ("[" * 50_000 + "]" * 50_000, "72")],
        *[("{" * 900 + "}" * 900, "72"), ("\ud800\x00\r\n\u2028" * 9_999, "72"), ("\x00", "\x00")],
    ]
    responses = [(respond(answer), truth) for answer, truth in pairs] + pairs
    expected = [result_of(tried(lambda pair=pair: r1_zero_reward_fn(*pair))) for pair in responses]
    assert {type(result) for result in expected} == {dict, Ungradable}
    results = pool.submit("maths", responses).result()
    assert [(kind_of(each), str(each)) for each in results] == [(kind_of(each), str(each)) for each in expected]


def test_results_keep_their_order_at_any_length(pool: RewardPool) -> None:
    answers = [str(index) + "x" * (index * 7919 % 50_000) for index in range(200)]
    results = pool.submit("own", [(answer, answer) for answer in answers]).result()
    assert [result["reward"] for result in results if not isinstance(result, ScoringError)] == [1.0] * 200
    assert pool.submit("own", []).result() == []


def test_errors_ungradable_answers_and_unreadable_truths_cost_no_worker(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine alone ends no worker: the patience is at most half of the limit.
    monkeypatch.setattr("grpo_ray.rewards.isolation.pool.PATIENCE_S", 60.0)
    monkeypatch.setattr(pool, "_timeout_s", 120.0)
    before = {worker.pid for worker in workers_of(pool)}
    obeyed(pool, *(f"{word} 72" for word in RAISING for _ in range(10)))
    answers = ["72", "(" * 200 + "72" + ")" * 200, "71"]
    right, ungradable, wrong = pool.submit("maths", [(respond(answer), "72") for answer in answers]).result()
    assert (right, wrong) == (verdict(True, True), verdict(True, False))
    assert isinstance(ungradable, Ungradable)
    assert str(ungradable) == "brackets nested more than 7 deep"
    (unread,) = pool.submit("maths", [(respond("72"), r"\frac{7}{")]).result()
    assert (kind_of(unread), "ground truth" in str(unread)) == ("error", True)
    assert {worker.pid for worker in workers_of(pool)} == before


def test_memory_that_an_answer_leaves_behind_fails_no_other(pool: RewardPool) -> None:
    assert obeyed(pool, *["keep 72"] * 10) == [1] * 10  # 150 MiB each, of 256


REASONS = {  # how they begin
    "binomial": "longer than 0.5 s (scorer.timeout_s)",
    "loop": "longer than 0.5 s (scorer.timeout_s)",
    "segfault": "SIGSEGV",
    "abort": "SIGABRT",
    "allocate": "too much memory (scorer.memory_gib)",
    # Stuck, but not because it computes.
    "sleep": "longer than 0.5 s (scorer.timeout_s), of which its worker ran for 0.0 s",
    "exit": "exit status 0",
    "exit-3": "exit status 3",
    "kill": "SIGKILL",
    "missing": "KeyError: 'no such key' (hostile_rewards.py:",
    "raise": "ValueError: a line\nand ? (hostile_rewards.py:",
    "recurse": "RecursionError: ",
}
MATHS = {  # sympy parses those with powers first; the integral takes until its worker is killed
    "10**10**10": "ungradable",
    r"((10^{999})^{999})^{999}": "ungradable",
    "99999999!": "ungradable",
    r"\int_0^{\infty} \sin(x^x)^{x^x} dx": "ungradable",
    r"\sqrt" * 20_000: "ungradable",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n^n}": 0.0,
    r"\begin{pmatrix}" + r" \\ ".join([" & ".join(["x"] * 12)] * 12) + r"\end{pmatrix}^{9999}": 0.0,
    r"\frac{144}{2}": 1.0,
    "73": 0.0,
}


def test_four_threads_of_hostile_inputs_get_the_right_results_and_reasons(pool: RewardPool) -> None:
    errors = {**dict.fromkeys([*DEADLY, *RAISING, "sleep"], "error")}
    kinds = {**dict.fromkeys(UNGRADABLE, "ungradable"), **errors}
    expected: dict[tuple[str, str], Any] = {("own", "72"): 1.0, ("own", "71"): 0.0}
    expected |= {("own", f"{word} 72"): 1.0 for word in HARMLESS}
    expected |= {("own", f"{word} 72"): f"{kind}: {REASONS.get(word, '')}" for word, kind in kinds.items()}
    expected |= {("maths", respond(answer)): kind for answer, kind in MATHS.items()}
    slow = {*(f"{word} 72" for word in (*ENDLESS, "grow")), *(respond(answer) for answer in [*MATHS][:4])}
    tasks = [task for task in expected for _ in range(1 if task[1] in slow else 4)]
    random.Random(0).shuffle(tasks)

    def grade(part: list[tuple[str, str]]) -> list[Any]:
        results: list[Any] = []
        for start in range(0, len(part), 20):
            for name in ("own", "maths"):
                chosen = [task for task in part[start : start + 20] if task[0] == name]
                graded = pool.submit(name, [(response, "72") for _, response in chosen]).result()
                values = [r["reward"] if isinstance(r, dict) else f"{kind_of(r)}: {r}" for r in graded]
                results += zip(chosen, values, strict=True)
        return results

    with ThreadPoolExecutor(4) as threads:
        results = [result for part in threads.map(grade, [tasks[i::4] for i in range(4)]) for result in part]
    assert len(results) == len(tasks)
    assert [each for each in results if not str(each[1]).startswith(str(expected[each[0]]))] == []


# ---- processes ----


def test_a_worker_that_died_between_answers_costs_none(pool: RewardPool) -> None:
    before = workers_of(pool)
    assert len(before) == 2
    for worker in before:
        worker.kill()
    psutil.wait_procs(before, timeout=600)
    assert obeyed(pool, *["72"] * 20) == [1] * 20
    assert not {worker.pid for worker in workers_of(pool)} & {worker.pid for worker in before}


def test_rewards_of_any_length_reach_the_fork_server() -> None:
    """A command line has room for 128 KiB."""
    with closing(RewardPool({"own": OWN, "x" * 200_000: OWN}, 1, 60.0, MEMORY_GIB)) as pool:
        assert are_right(grade(pool, "72"))


def test_a_fork_server_that_died_costs_no_answer() -> None:
    with pool_of(2) as pool:
        workers, fork_server = workers_of(pool), fork_server_of(pool)
        fork_server.kill()
        psutil.wait_procs([fork_server, *workers], timeout=600)
        assert obeyed(pool, *["72"] * 20) == [1] * 20
        assert fork_server_of(pool).pid != fork_server.pid


def test_a_fork_server_that_hangs_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(2) as pool, ThreadPoolExecutor() as threads, monkeypatch.context() as patch:
        pool.start()
        fork_server = fork_server_of(pool)
        patch.setattr(processes, "START_TIMEOUT_S", 1)
        fork_server.suspend()
        graded = threads.submit(obeyed, pool, *["72"] * 20)
        fork_server.wait(120)
        patch.undo()  # the next fork server may take its time
        assert graded.result() == [1] * 20
        assert fork_server_of(pool).pid != fork_server.pid


def test_a_fork_server_that_hangs_while_it_imports_is_replaced_for_the_next_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pool_of(1) as pool:
        fork_server = fork_server_of(pool)
        fork_server.suspend()
        with monkeypatch.context() as patch:
            patch.setattr(processes, "START_TIMEOUT_S", 0.1)
            patch.setattr(processes, "END_TIMEOUT_S", 0.1)
            with pytest.raises(RunError, match="importing took longer"):
                obeyed(pool, "72")
        assert not fork_server.is_running()
        assert obeyed(pool, "72", "71") == [1, 0]


@pytest.mark.parametrize("slow", ["doze 72", "sleep 72"])
def test_a_slow_answer_does_not_delay_those_sent_with_it(
    pool: RewardPool, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    settled: list[bytes] = []
    settle = _Answer.settle

    def record(answer: _Answer, result: Any) -> None:
        settled.append(answer.line)
        settle(answer, result)

    monkeypatch.setattr(_Answer, "settle", record)
    draw = random.Random(0)
    values = [draw.randrange(2) for _ in range(50)]
    results = obeyed(pool, slow, *(("71", "72")[value] for value in values))
    assert results[1:] == values
    assert (results[0] == 1) == (slow == "doze 72")
    assert slow.encode() in settled[-1]
    assert len(settled) == 51  # each can be settled once


def test_a_time_limit_may_be_very_short(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_timeout_s", 0.05)
    (why,) = obeyed(pool, "sleep 72")
    assert "its worker ran for" in why


def test_close_leaves_no_process() -> None:
    pool = RewardPool({"own": OWN}, 2, 60.0, MEMORY_GIB)
    processes = [*workers_of(pool), fork_server_of(pool)]
    with ThreadPoolExecutor() as threads:
        slow = threads.submit(obeyed, pool, *["loop 72"] * 50)
        pool.close()
        with pytest.raises(RunError, match="closed"):
            slow.result(timeout=30)
    with pytest.raises(RunError, match="closed"):
        obeyed(pool, "72")
    assert len(processes) >= 2
    assert not any(process.is_running() for process in processes)


OWNER = """
import sys
sys.path.insert(0, {folder!r})
from grpo_ray.rewards.isolation.pool import RewardPool
pool = RewardPool({{"own": "hostile_rewards:obey"}}, 1, timeout_s=120, memory_gib=0.25)
pool.submit("own", [("72", "72")]).result()
print(pool._fork_server._process.pid, flush=True)
pool.submit("own", [("loop 72", "72")]).result()
"""


def test_a_killed_owner_leaves_no_process_even_during_a_computation() -> None:
    script = OWNER.format(folder=str(Path(__file__).parents[1]))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    fork_server = psutil.Process(int(owner.stdout.readline()))
    while len(workers := fork_server.children()) != 1:  # the fork server has forked, or looks for one to end
        time.sleep(0.02)
    (worker,) = workers
    before = worker.cpu_times().user
    while worker.cpu_times().user < before + 0.2:  # while it computes, it would not notice the end of its input
        time.sleep(0.02)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert psutil.wait_procs([worker, fork_server], timeout=600)[1] == []


def test_a_process_does_not_outlive_a_parent_that_has_already_ended() -> None:
    with pytest.raises(SystemExit, match="gone"):
        die_with_parent(os.getppid() + 1, number=0)  # no signal: this process goes on


def test_workers_that_cannot_start_raise_an_error_with_the_cause(tmp_path, monkeypatch) -> None:
    (tmp_path / "bad_rewards.py").write_text("import a_missing_library")
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(Grader({"": "bad_rewards:reward_fn"}, ScorerConfig(num_workers=1))) as grader:
        with pytest.raises(RunError, match=r"task\.reward.*a_missing_library"):
            grader.start()
        with pytest.raises(RunError, match="a_missing_library"):
            grader.grade("", [("72", "72")])


def test_a_module_that_hangs_on_import_raises_an_error_that_says_so(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_rewards.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "START_TIMEOUT_S", 1)
    with closing(RewardPool({"": "slow_rewards:reward_fn"}, 1, 5.0, MEMORY_GIB)) as pool:
        assert pool._fork_server._process.wait() == -signal.SIGALRM  # its own limit; the pool's is tested above
        with pytest.raises(RunError, match=r"task\.reward.*: importing took longer than 1 s"):
            pool.start()


def test_a_worker_whose_limits_are_refused_raises_an_error_with_the_cause() -> None:
    too_much_gib = 2**40  # more than setrlimit can take
    refused = pytest.raises(RunError, match="no worker can be started")
    with closing(RewardPool({"own": OWN}, 1, 5.0, too_much_gib)) as pool, refused:
        obeyed(pool, "72")


def test_the_grader_keeps_simple_rewards_in_this_process() -> None:
    with closing(Grader({"simple": "exact_match"}, ScorerConfig())) as grader:
        before = psutil.Process().children()
        right, wrong = grader.grade("simple", [(respond("01258"), "01258"), (respond("1"), "01258")])
        assert [right["reward"], wrong["reward"]] == [1, 0]
        assert psutil.Process().children() == before


# ---- confinement ----


def test_a_worker_inherits_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXAMPLE_TOKEN", "SOMETHING", "LC_ALL"):
        monkeypatch.setenv(name, "C.UTF-8")
    assert {"EXAMPLE_TOKEN", "SOMETHING"} & reward_environment().keys() == set()
    assert {"LC_ALL", "PATH"} <= reward_environment().keys()
    assert reward_environment(["SOMETHING"])["SOMETHING"] == "C.UTF-8"


def test_a_worker_confines_itself(pool: RewardPool) -> None:
    for worker in workers_of(pool):
        status = Path(f"/proc/{worker.pid}/status").read_text().split()
        assert status[status.index("NoNewPrivs:") + 1] == "1"
        assert status[status.index("Seccomp:") + 1] == str(2 * protection_here().has_filter)
        for limit in (psutil.RLIMIT_FSIZE, psutil.RLIMIT_CORE, psutil.RLIMIT_NPROC):
            assert worker.rlimit(limit) == (0, 0)
        memory, _ = worker.rlimit(psutil.RLIMIT_AS)
        assert 0.25 * 2**30 < memory < fork_server_of(pool).memory_info().vms + 0.26 * 2**30
        files = os.listdir(f"/proc/{worker.pid}/fd")
        assert len([fd for fd in files if "socket" in os.readlink(f"/proc/{worker.pid}/fd/{fd}")]) == 1


# ---- workers that were taken over by an answer ----


@pytest.fixture(scope="module")
def lone() -> Iterator[RewardPool]:
    """Share a pool of one worker, so that each answer meets what the previous one left behind."""
    with pool_of(1, timeout_s=1.0) as pool:
        pool.start()
        yield pool


@pytest.mark.parametrize("word", ["flood", "fill", "forge-no-json", "forge-ready"])
def test_garbage_is_an_error_of_its_answer_alone(lone: RewardPool, word: str) -> None:
    garbage, *others = grade(lone, f"{word} 72", *RIGHT)
    assert isinstance(garbage, ScoringError)
    assert "its worker sent " in str(garbage)
    assert len(str(garbage)) < 700
    assert are_right(others)


def test_a_worker_that_fills_its_channel_and_ends_later_blocks_nothing(lone: RewardPool) -> None:
    assert are_right(grade(lone, "fill-later 72"))
    assert psutil.wait_procs(fork_server_of(lone).children(), timeout=600)[1] == []
    assert are_right(grade(lone, *RIGHT))


def test_a_second_verdict_is_not_the_next_answers(lone: RewardPool) -> None:
    grade(lone, "forge-right 71")  # the worker sends its own verdict afterwards
    time.sleep(1)  # until that has arrived; before, it would count for the next answer: docs/threats.md
    (wrong,) = grade(lone, "71")
    assert wrong["reward"] == 0
    (forged,) = grade(lone, "forge-right 71")
    assert are_right([forged])  # its own verdict can be forged: docs/threats.md
    time.sleep(1)  # as above
    assert are_right(grade(lone, "72"))


def test_a_worker_that_takes_no_more_answers_is_ended_in_time(lone: RewardPool) -> None:
    assert are_right(grade(lone, "deaf-later 72"))
    time.sleep(1.5)
    (result,) = grade(lone, "72" + " " * 2_000_000)  # more than the socket holds
    assert str(result) == "longer than 1 s (scorer.timeout_s)"
    assert are_right(grade(lone, *RIGHT))


def test_workers_that_end_before_they_begin_are_an_error_and_no_exception(lone: RewardPool) -> None:
    forgotten, *others = grade(lone, "forget 72", *RIGHT)
    assert (type(forgotten), str(forgotten)) == (ScoringError, "its workers end before they have begun it")
    assert are_right(others)


def test_a_signal_without_a_name_ends_one_worker_and_not_the_fork_server(lone: RewardPool) -> None:
    process = lone._fork_server._process
    error, *others = grade(lone, "real-time-signal 72", *RIGHT)
    assert (type(error), str(error)) == (ScoringError, "signal 35")
    assert are_right(others)
    assert lone._fork_server._process is process


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
resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))  # less than a worker may take
_, most = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, most))
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_NPROC, (most, most)))
_ForkServer(socket.socket(fileno=int(sys.argv[1])), {{}}, Confinement(2048)).run()
"""


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


def test_a_refusal_that_lasts_is_an_error_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PAUSES_S", (0.01, 0.02))
    refuse = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    with pool_of(1, timeout_s=1.0) as pool:
        pool.start()
        with monkeypatch.context() as patch:
            patch.setattr(processes.socket, "socketpair", refuse)
            message = r"the system has refused another process or file \(.*Too many open files"
            with pytest.raises(RunError, match=message):
                grade(pool, "72")
        assert refuse.call_count == 3
        assert are_right(grade(pool, "72"))


def test_a_fork_server_that_cannot_be_started_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = BlockingIOError(11, "Resource temporarily unavailable")
    refused_twice = Mock(wraps=processes.subprocess.Popen, side_effect=[refusal, refusal, DEFAULT])
    monkeypatch.setattr(processes.subprocess, "Popen", refused_twice)
    with pool_of(1, timeout_s=30.0) as pool:
        assert are_right(grade(pool, "72"))
    assert refused_twice.call_count == 3


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
    started = time.thread_time()
    with suppress(NotGraded, Ungradable):
        function(response, truth)
    return time.thread_time() - started


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
