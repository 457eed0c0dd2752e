"""Grading in processes that may die, and can do nothing but grade."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from builders import respond
from hostile_rewards import DEADLY, ENDLESS, HARMLESS, RAISING, UNGRADABLE
from run_process import until

from grpo_ray.config.reward import ScorerConfig
from grpo_ray.config.secrets import reward_environment
from grpo_ray.errors import RunError
from grpo_ray.rewards.base import Overrun, Result, ScoringError, Ungradable, verdict
from grpo_ray.rewards.builtin import r1_zero_reward_fn
from grpo_ray.rewards.configured import tried
from grpo_ray.rewards.grader import Grader
from grpo_ray.rewards.isolation import processes
from grpo_ray.rewards.isolation.confinement import die_with_parent, protection_here
from grpo_ray.rewards.isolation.pool import RewardPool, _Answer
from grpo_ray.rewards.isolation.worker import result_of

pytestmark = pytest.mark.slow  # workers are started, killed and waited for
OWN = "hostile_rewards:obey"
REWARDS = {"maths": "r1_zero", "own": OWN}
TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """Share a pool of two workers, and its fork server, between all tests.

    Its limits are of processor time: on a busy machine no answer takes too long that would not on an idle one.
    """
    pool = RewardPool(REWARDS, num_workers=2, timeout_s=TIMEOUT_S, memory_gib=0.25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_ray.rewards.isolation.pool.LEAST_SHARE", 0.9)
        patch.setattr("grpo_ray.rewards.isolation.pool.MAX_EXTENSIONS", 1000)
        yield pool
    pool.close()


def obeyed(pool: RewardPool, *responses: str) -> list[Any]:
    """Return 1 or 0 for each graded response, and for others the reason why they have no grade."""
    results = pool.submit("own", [(response, "72") for response in responses]).result()
    return [result["reward"] if isinstance(result, dict) else str(result) for result in results]


def kind_of(result: Result) -> str:
    """Return `ungradable` or `error`, or `graded`."""
    kinds = {Ungradable: "ungradable", Overrun: "ungradable", ScoringError: "error"}
    return kinds.get(type(result), "graded")


def fork_server_of(pool: RewardPool) -> psutil.Process:
    return psutil.Process(pool._fork_server._process.pid)


def workers_of(pool: RewardPool) -> list[psutil.Process]:
    """Return both workers: neither can take two answers while the other has none."""
    assert obeyed(pool, *["nap 72"] * 2) == [1] * 2
    until(lambda: len(fork_server_of(pool).children()) <= 2)  # one of an earlier test may still be ending
    return fork_server_of(pool).children()


# Verdicts


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
    assert list(map(kind_of, results)) == list(map(kind_of, expected))
    plain = [
        [result if isinstance(result, dict) else str(result) for result in some] for some in (results, expected)
    ]
    assert plain[0] == plain[1]


def test_results_keep_their_order_at_any_length(pool: RewardPool) -> None:
    answers = [str(index) + "x" * (index * 7919 % 50_000) for index in range(200)]
    results = pool.submit("own", [(answer, answer) for answer in answers]).result()
    assert [result["reward"] for result in results if not isinstance(result, ScoringError)] == [1.0] * 200
    assert pool.submit("own", []).result() == []


REASONS = {  # the kind of each word's result, and how its reason begins
    "binomial": ("ungradable", "longer than 0.5 s (scorer.timeout_s)"),
    "loop": ("ungradable", "longer than 0.5 s (scorer.timeout_s)"),
    "segfault": ("ungradable", "SIGSEGV"),
    "abort": ("ungradable", "SIGABRT"),
    "allocate": ("ungradable", "too much memory (scorer.memory_gib)"),
    # Stuck, but not because it computes.
    "sleep": ("error", "longer than 0.5 s (scorer.timeout_s), of which its worker ran for 0.0 s"),
    "exit": ("error", "exit status 0"),
    "exit-3": ("error", "exit status 3"),
    "kill": ("error", "SIGKILL"),
    "missing": ("error", "KeyError: 'no such key' (hostile_rewards.py:"),
    "raise": ("error", "ValueError: a line\nand ? (hostile_rewards.py:"),
    "recurse": ("error", "RecursionError: "),
}


@pytest.mark.parametrize("word", REASONS)
def test_an_answer_without_a_grade_has_its_reason_and_costs_no_other(pool: RewardPool, word: str) -> None:
    first, bad, last = pool.submit("own", [("72", "72"), (f"{word} 72", "72"), ("72", "72")]).result()
    assert (kind_of(first), kind_of(bad), kind_of(last)) == ("graded", REASONS[word][0], "graded")
    assert str(bad).startswith(REASONS[word][1])


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


MATHS = {  # sympy parses those with powers first; the integral takes until its worker is killed
    "10**10**10": "ungradable",
    r"((10^{999})^{999})^{999}": "ungradable",
    "99999999!": "ungradable",
    r"\int_0^{\infty} \sin(x^x)^{x^x} dx": "ungradable",
    r"\sqrt" * 20_000: "ungradable",
    r"\sum_{n=1}^{10^{12}} \frac{1}{n^n}": 0,
    r"\begin{pmatrix}" + r" \\ ".join([" & ".join(["x"] * 12)] * 12) + r"\end{pmatrix}^{9999}": 0,
    r"\frac{144}{2}": 1,
    "73": 0,
}


def test_four_threads_of_hostile_inputs_get_the_right_results(pool: RewardPool) -> None:
    errors = {**dict.fromkeys([*DEADLY, *RAISING, "sleep"], "error")}
    kinds = {**dict.fromkeys(UNGRADABLE, "ungradable"), **errors, **dict.fromkeys(HARMLESS, 1)}
    expected: dict[tuple[str, str], Any] = {("own", "72"): 1, ("own", "71"): 0}
    expected |= {("own", f"{word} 72"): kind for word, kind in kinds.items()}
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
                values = [one["reward"] if isinstance(one, dict) else kind_of(one) for one in graded]
                results += zip(chosen, values, strict=True)
        return results

    with ThreadPoolExecutor(4) as threads:
        results = [result for part in threads.map(grade, [tasks[i::4] for i in range(4)]) for result in part]
    assert len(results) == len(tasks)
    assert [(task, found) for task, found in results if found != expected[task]] == []


# Processes


def test_a_worker_that_died_between_answers_costs_none(pool: RewardPool) -> None:
    before = workers_of(pool)
    assert len(before) == 2
    for worker in before:
        worker.kill()
    psutil.wait_procs(before, timeout=600)
    assert obeyed(pool, *["72"] * 20) == [1] * 20
    assert not {worker.pid for worker in workers_of(pool)} & {worker.pid for worker in before}


def test_a_fork_server_that_died_costs_no_answer() -> None:
    pool = RewardPool({"own": OWN}, num_workers=2, timeout_s=60, memory_gib=0.25)
    workers, fork_server = workers_of(pool), fork_server_of(pool)
    fork_server.kill()
    psutil.wait_procs([fork_server, *workers], timeout=600)
    assert obeyed(pool, *["72"] * 20) == [1] * 20
    assert fork_server_of(pool).pid != fork_server.pid
    pool.close()


def test_a_fork_server_that_hangs_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RewardPool({"own": OWN}, num_workers=2, timeout_s=60, memory_gib=0.25)
    pool.start()
    fork_server = fork_server_of(pool)
    with ThreadPoolExecutor() as threads, monkeypatch.context() as patch:
        patch.setattr(processes, "START_TIMEOUT_S", 1)
        fork_server.suspend()
        graded = threads.submit(obeyed, pool, *["72"] * 20)
        fork_server.wait(120)
        patch.undo()  # the next fork server may take its time
        assert graded.result() == [1] * 20
    assert fork_server_of(pool).pid != fork_server.pid
    pool.close()


def test_a_fork_server_that_hangs_while_it_imports_is_replaced_for_the_next_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = RewardPool({"own": OWN}, num_workers=1, timeout_s=60, memory_gib=0.25)
    fork_server = fork_server_of(pool)
    fork_server.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(processes, "START_TIMEOUT_S", 0.1)
        patch.setattr(processes, "END_TIMEOUT_S", 0.1)
        with pytest.raises(RunError, match="importing took longer"):
            obeyed(pool, "72")
    assert not fork_server.is_running()
    assert obeyed(pool, "72", "71") == [1, 0]
    pool.close()


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
    pool = RewardPool({"own": OWN}, num_workers=2, timeout_s=60, memory_gib=0.25)
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
    grader = Grader({"": "bad_rewards:reward_fn"}, ScorerConfig(num_workers=1))
    with pytest.raises(RunError, match=r"task\.reward.*a_missing_library"):
        grader.start()
    with pytest.raises(RunError, match="a_missing_library"):
        grader.grade("", [("72", "72")])
    grader.close()


def test_a_module_that_hangs_on_import_raises_an_error_that_says_so(tmp_path, monkeypatch) -> None:
    (tmp_path / "slow_rewards.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "START_TIMEOUT_S", 1)
    pool = RewardPool({"": "slow_rewards:reward_fn"}, 1, timeout_s=5, memory_gib=0.25)
    assert pool._fork_server._process.wait() == -signal.SIGALRM  # its own limit; the pool's is tested above
    with pytest.raises(RunError, match=r"task\.reward.*: importing took longer than 1 s"):
        pool.start()
    pool.close()


def test_a_worker_whose_limits_are_refused_raises_an_error_with_the_cause() -> None:
    too_much_gib = 2**40  # more than setrlimit can take
    pool = RewardPool({"own": OWN}, num_workers=1, timeout_s=5, memory_gib=too_much_gib)
    with pytest.raises(RunError, match="no worker can be started"):
        obeyed(pool, "72")
    pool.close()


def test_the_grader_keeps_simple_rewards_in_this_process() -> None:
    grader = Grader({"simple": "exact_match"}, ScorerConfig())
    before = psutil.Process().children()
    right, wrong = grader.grade("simple", [(respond("01258"), "01258"), (respond("1"), "01258")])
    assert [right["reward"], wrong["reward"]] == [1, 0]
    assert psutil.Process().children() == before
    grader.close()


# Confinement


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
