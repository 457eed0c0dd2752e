"""Grading in processes that may die, and can do nothing but grade."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hostile_rewards import DEADLY, ENDLESS, HARMLESS, RAISING, UNGRADABLE

from grpo_ray.config import ScorerConfig
from grpo_ray.errors import RunError
from grpo_ray.rewards.base import Overrun, Result, ScoringError, Ungradable, verdict
from grpo_ray.rewards.builtin import r1_zero_reward_fn
from grpo_ray.rewards.grader import Grader
from grpo_ray.rewards.isolation import processes
from grpo_ray.rewards.isolation.confinement import protection_here
from grpo_ray.rewards.isolation.pool import RewardPool
from grpo_ray.rewards.isolation.worker import try_to_grade

pytestmark = pytest.mark.slow  # workers are started, killed and waited for
OWN = "hostile_rewards:obey"
REWARDS = {"maths": "r1_zero", "own": OWN}
TIMEOUT_S = 1.0


def respond(answer: str) -> str:
    return f" thinking </think> <answer> {answer} </answer>"


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """Share a pool of two workers, and its fork server, between all tests."""
    pool = RewardPool(REWARDS, num_workers=2, timeout_s=TIMEOUT_S, memory_gib=0.25)
    yield pool
    pool.close()


def obeyed(pool: RewardPool, *responses: str) -> list[Any]:
    """Return 1 or 0 for each graded response, and for others the reason why they have no grade."""
    results = pool.grade("own", [(response, "72") for response in responses])
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
    return fork_server_of(pool).children()


# Verdicts


def test_verdicts_are_those_of_the_function_itself(pool: RewardPool) -> None:
    pairs = [
        *[("72", "72"), ("0.5", r"\frac{1}{2}"), ("71", "72"), ("line\nbreak ü", "72"), ("", "72")],
        *[("9" * 100_000, "72"), ("(" * 100_000, "72"), ("[" * 50_000 + "]" * 50_000, "72")],
        *[("{" * 900 + "}" * 900, "72"), ("\ud800\x00\r\n\u2028" * 9_999, "72"), ("\x00", "\x00")],
    ]
    responses = [(respond(answer), truth) for answer, truth in pairs] + pairs
    expected = [try_to_grade(r1_zero_reward_fn, *pair) for pair in responses]
    assert {type(result) for result in expected} == {dict, Ungradable}
    results = pool.grade("maths", responses)
    assert list(map(kind_of, results)) == list(map(kind_of, expected))
    plain = [
        [result if isinstance(result, dict) else str(result) for result in some] for some in (results, expected)
    ]
    assert plain[0] == plain[1]


def test_no_answers_give_no_results(pool: RewardPool) -> None:
    assert pool.grade("maths", []) == []


def test_results_keep_their_order_at_any_length(pool: RewardPool) -> None:
    answers = [str(index) + "x" * (index * 7919 % 50_000) for index in range(200)]
    results = pool.grade("own", [(answer, answer) for answer in answers])
    assert [result["reward"] for result in results if not isinstance(result, ScoringError)] == [1.0] * 200
    assert obeyed(pool, "72", "71", "print 72", "print 71") == [1, 0, 1, 0]


# Answers that cannot be graded


UNGRADABLE_WHY = [
    ("binomial", "longer than 1 s (scorer.timeout_s)"),
    ("segfault", "SIGSEGV"),
    ("abort", "SIGABRT"),
    ("allocate", "too much memory (scorer.memory_gib)"),
    ("grow", "too much memory (scorer.memory_gib)"),
]


@pytest.mark.parametrize(("word", "why"), UNGRADABLE_WHY)
def test_an_answer_that_runs_away_is_ungradable(pool: RewardPool, word: str, why: str) -> None:
    first, bad, last = pool.grade("own", [("72", "72"), (f"{word} 72", "72"), ("72", "72")])
    assert (kind_of(first), kind_of(bad), kind_of(last)) == ("graded", "ungradable", "graded")
    assert str(bad) == why


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("exit", "exit status 0"),
        ("exit-3", "exit status 3"),
        ("kill", "SIGKILL"),
        ("missing", "KeyError: 'no such key' (hostile_rewards.py:"),
        ("raise", "ValueError: a line\nand ? (hostile_rewards.py:"),
        ("recurse", "RecursionError: "),
    ],
)
def test_a_function_that_raises_or_a_worker_that_is_killed_is_an_error_with_its_cause(
    pool: RewardPool, word: str, why: str
) -> None:
    first, bad, last = pool.grade("own", [("72", "72"), (f"{word} 72", "72"), ("72", "72")])
    assert (kind_of(first), kind_of(bad), kind_of(last)) == ("graded", "error", "graded")
    assert str(bad).startswith(why)


def test_a_reward_that_raises_keeps_its_worker(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "grpo_ray.rewards.isolation.pool.PATIENCE_S", 60.0
    )  # so that a busy machine alone ends no worker
    before = {worker.pid for worker in workers_of(pool)}
    obeyed(pool, *(f"{word} 72" for word in RAISING for _ in range(10)))
    assert {worker.pid for worker in workers_of(pool)} == before


def test_memory_that_an_answer_leaves_behind_fails_no_other(pool: RewardPool) -> None:
    assert obeyed(pool, *["keep 72"] * 10) == [1] * 10  # 150 MiB each, of 256


UNGRADABLE_MATHS = [
    "10**10**10",
    r"\binom{1000000000}{500000000}",
    "9" * 100_000,
    "{" * 100_000,
    "(" * 200 + "5" + ")" * 200,
    r"\frac{" * 500 + "1" + "}{2}" * 500,
    r"\sqrt{" * 500 + "2" + "}" * 500,
    r"\sqrt" * 20_000,
    "1+" * 50_000 + "1",
    "\ud800" * 1000,
    r"\begin{pmatrix}" + r" \\ ".join([" & ".join(["1"] * 200)] * 200) + r"\end{pmatrix}",
]
WRONG = [
    "7\x002",
    r"\begin{pmatrix}" + r" \\ ".join([" & ".join(["x"] * 12)] * 12) + r"\end{pmatrix}^{9999}",
]
# True: ungradable. sympy parses these first; the integral takes until its worker is killed.
SLOW_MATHS = {
    "9^{9^{9^9}}": True,
    r"((10^{999})^{999})^{999}": True,
    r"\binom{10^9}{5*10^8}": True,
    "((((5!)!)!)!)!": True,
    "99999999!": True,
    r"\int_0^{\infty} \sin(x^x)^{x^x} dx": True,
    r"\sum_{n=1}^{10^{12}} \frac{1}{n^n}": False,
}
MATHS = {**dict.fromkeys(UNGRADABLE_MATHS, True), **dict.fromkeys(WRONG, False)}


@pytest.mark.slow
def test_the_pool_survives_a_thousand_hostile_inputs_with_the_right_counts(pool: RewardPool) -> None:
    words = {
        **dict.fromkeys([*DEADLY, *RAISING, *HARMLESS, "segfault", "abort", "allocate"], 20),
        **dict.fromkeys([*ENDLESS, "grow", "nap", "doze"], 1),  # these take long
    }
    own = [f"{word} 72" for word, n in words.items() for _ in range(n)]
    maths = [*SLOW_MATHS, *(answer for _ in range(50) for answer in MATHS)][: 1000 - len(own)]
    tasks = [("own", response, "72") for response in own]
    tasks += [("maths", respond(answer), "72") for answer in maths]
    assert len(tasks) == 1000
    tasks += [("own", "72", "72"), ("own", "71", "72")] * 100
    tasks += [("maths", respond(r"\frac{144}{2}"), "72"), ("maths", respond("73"), "72")] * 100
    expected_kinds = {
        **{f"{word} 72": "error" for word in {**DEADLY, **RAISING}},
        **{f"{word} 72": "ungradable" for word in UNGRADABLE},
        "sleep 72": "error",  # it is stuck, but not because it computes
        **{respond(answer): "ungradable" for answer, value in {**SLOW_MATHS, **MATHS}.items() if value},
    }
    is_right = {"72", respond(r"\frac{144}{2}"), *(f"{word} 72" for word in HARMLESS)}
    random.Random(0).shuffle(tasks)
    results: dict[tuple[str, str, str], list[Any]] = {task: [] for task in tasks}

    def grade(part: list[tuple[str, str, str]]) -> None:
        for start in range(0, len(part), 20):
            for name in ("own", "maths"):
                chosen = [task for task in part[start : start + 20] if task[0] == name]
                for task, result in zip(chosen, pool.grade(name, [t[1:] for t in chosen]), strict=True):
                    results[task].append(result["reward"] if isinstance(result, dict) else kind_of(result))

    threads = [threading.Thread(target=grade, args=(tasks[index::4],)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(map(len, results.values())) == 1400
    for (_, response, _), outcomes in results.items():
        expected = expected_kinds.get(response, float(response in is_right))
        assert set(outcomes) == {expected}, response[:100]


def test_an_ungradable_answer_costs_no_worker(pool: RewardPool) -> None:
    before = {worker.pid for worker in workers_of(pool)}
    answers = ["72", "(" * 200 + "72" + ")" * 200, "71"]
    right, ungradable, wrong = pool.grade("maths", [(respond(answer), "72") for answer in answers])
    assert (right, wrong) == (verdict(True, True), verdict(True, False))
    assert isinstance(ungradable, Ungradable)
    assert str(ungradable) == "brackets nested more than 7 deep"
    assert {worker.pid for worker in workers_of(pool)} == before


def test_a_truth_that_cannot_be_read_is_an_error(pool: RewardPool) -> None:
    (result,) = pool.grade("maths", [(respond("72"), r"\frac{7}{")])
    assert isinstance(result, ScoringError)
    assert "ground truth" in str(result)


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
    settled: list[int] = []
    settle = pool._settle

    def record(answer: Any, result: Any) -> None:
        settled.append(answer.index)
        settle(answer, result)

    monkeypatch.setattr(pool, "_settle", record)
    draw = random.Random(0)
    values = [draw.randrange(2) for _ in range(50)]
    results = obeyed(pool, slow, *(("71", "72")[value] for value in values))
    assert results[1:] == values
    assert (results[0] == 1) == (slow == "doze 72")
    assert settled[-1] == 0
    assert sorted(settled) == list(range(51))


def test_a_time_limit_may_be_very_short(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_timeout_s", 0.05)
    (why,) = obeyed(pool, "sleep 72")
    assert "its worker ran for" in why


def test_a_worker_that_takes_too_long_is_ended(pool: RewardPool) -> None:
    workers = workers_of(pool)
    reasons = obeyed(pool, "loop 72", "sleep 72")
    assert all(why.startswith("longer than 1 s (scorer.timeout_s)") for why in reasons)
    assert psutil.wait_procs(workers, timeout=600)[1] == []


def test_time_that_a_worker_did_not_run_is_not_its_answers_doing(pool: RewardPool) -> None:
    """An endless computation is a wrong answer; a worker that was stopped, or starved, says nothing of it."""
    computing, stopped = (pool.grade("own", [(order, "72")])[0] for order in ("loop 72", "sleep 72"))
    assert (kind_of(computing), kind_of(stopped)) == ("ungradable", "error")
    assert str(stopped) == "longer than 1 s (scorer.timeout_s), of which its worker ran for 0.0 s"


def test_close_leaves_no_process() -> None:
    pool = RewardPool({"own": OWN}, num_workers=2, timeout_s=60, memory_gib=0.25)
    processes = [*workers_of(pool), fork_server_of(pool)]
    errors: list[RunError] = []

    def grade() -> None:
        with pytest.raises(RunError) as error:
            obeyed(pool, *["loop 72"] * 50)
        errors.append(error.value)

    slow = threading.Thread(target=grade)
    slow.start()
    pool.close()
    slow.join(timeout=30)
    assert "closed" in str(errors)
    with pytest.raises(RunError, match="closed"):
        obeyed(pool, "72")
    assert len(processes) >= 2
    assert not any(process.is_running() for process in processes)


OWNER = """
import sys
sys.path.insert(0, {folder!r})
from grpo_ray.rewards.isolation.pool import RewardPool
pool = RewardPool({{"own": "hostile_rewards:obey"}}, 1, timeout_s=120, memory_gib=0.25)
pool.grade("own", [("72", "72")])
print(pool._fork_server._process.pid, flush=True)
pool.grade("own", [("loop 72", "72")])
"""


def test_a_killed_owner_leaves_no_process_even_during_a_computation() -> None:
    script = OWNER.format(folder=str(Path(__file__).parents[1]))
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
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
    script = "from grpo_ray.rewards.isolation.confinement import die_with_parent\ndie_with_parent(1)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "gone" in result.stderr


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
    pools = [RewardPool({"": "slow_rewards:reward_fn"}, 1, timeout_s=5, memory_gib=0.25) for _ in range(2)]
    said = r"task\.reward.*: importing took longer than 1 s"
    with pytest.raises(RunError, match=said):  # from the pool, which has waited since the start
        pools[0].start()
    assert pools[1]._fork_server._process.wait() == -signal.SIGALRM
    with pytest.raises(RunError, match=said):  # from the fork server's own limit
        pools[1].start()
    for pool in pools:
        pool.close()


def test_a_worker_whose_limits_are_refused_raises_an_error_with_the_cause() -> None:
    pool = RewardPool(
        {"own": OWN}, num_workers=1, timeout_s=5, memory_gib=2**40
    )  # more than setrlimit can take
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


def test_a_worker_inherits_no_secret(monkeypatch) -> None:
    monkeypatch.setenv("EXAMPLE_TOKEN", "for the Scorer alone")
    monkeypatch.setenv("SOMETHING", "else")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    pool = RewardPool({"own": OWN}, num_workers=1, timeout_s=5, memory_gib=0.25)
    environments = [process.environ() for process in (*workers_of(pool), fork_server_of(pool))]
    pool.close()
    assert len(environments) == 2
    for environment in environments:
        assert environment["LC_ALL"] == "C.UTF-8"
        assert environment["PATH"] == os.environ["PATH"]
        assert not {"EXAMPLE_TOKEN", "SOMETHING"} & environment.keys()


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
