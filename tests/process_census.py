"""A count of the processes that tests start: clusters, engines, and other programs. A plugin of pytest.

Starts are what a suite's time goes into, so each kind has a budget, and tests that exceed it fail. They are
observed, in /proc, and not declared: what a child of a child starts counts as well.
"""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

BUDGET = {"clusters of Ray": 6, "vLLM engines in runs": 6, "vLLM engines alone": 5, "other programs": 40}
PERIOD_S = 1.0
SCANNING = threading.Lock()  # a test that counts objects holds it: a scan makes many
FREE_CPU_S = 1.5
"""A program that needs less of a processor is free. On a busy machine it lives longer, but needs no more."""
NAME_CHARS = 60
HELPERS = (
    "resource_tracker", "/ray/", "bin/ray ", "ray.util", "--multiprocessing-fork", "vllm_worker", "chrom",
    "landlock", " -S ",
)  # fmt: skip
"""Parts of a cluster or of another program, and `python -S`, which loads no package."""


@dataclass
class Seen:
    parent: int
    command: str
    cpu_s: float = 0.0


class Census:
    """A thread that looks at the processes below this one."""

    def __init__(self, root: int) -> None:
        self._root, self._seen = root, dict[int, Seen]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="process census", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(PERIOD_S):
            with SCANNING:
                self.scan()

    def scan(self) -> None:
        for process in psutil.process_iter():  # by rising pid
            known = self._seen.get(process.pid)
            with contextlib.suppress(psutil.Error):
                if known is not None:
                    known.cpu_s = max(known.cpu_s, cpu_seconds_of(process.pid))
                    known.command = command_of(process) or known.command  # titles are set late
                elif (parent := process.ppid()) == self._root or parent in self._seen:
                    self._seen[process.pid] = Seen(parent, command_of(process))

    def counts(self) -> dict[str, int]:
        kinds = Counter(kind for pid in self._seen if (kind := self._kind(pid)) is not None)
        return {kind: kinds[kind] for kind in BUDGET}

    def programs(self) -> dict[str, int]:
        """Return the number of other programs by what they run."""
        return Counter(
            " ".join(seen.command.split()[1:6])[-NAME_CHARS:]
            for pid, seen in self._seen.items()
            if self._kind(pid) == "other programs"
        )

    def _kind(self, pid: int) -> str | None:
        seen = self._seen[pid]
        if "gcs_server" in seen.command.partition(" ")[0]:
            return "clusters of Ray"
        above = [self._seen[each].command for each in self._ancestors(pid)]
        is_in_run = any("raylet" in command.partition(" ")[0] for command in above)
        if seen.command.startswith("VLLM::EngineCore"):
            return "vLLM engines in runs" if is_in_run else "vLLM engines alone"
        parent = above[0] if above else command_of(psutil.Process(self._root))
        is_program = seen.cpu_s >= FREE_CPU_S and seen.command != parent
        if is_in_run or not is_program or any(helper in seen.command for helper in HELPERS):
            return None
        return "other programs" if "python" in seen.command.partition(" ")[0] else None

    def _ancestors(self, pid: int) -> Iterator[int]:
        parent = self._seen[pid].parent
        while parent in self._seen and parent != pid:
            yield parent
            pid, parent = parent, self._seen[parent].parent


def command_of(process: psutil.Process) -> str:
    return " ".join(process.cmdline()).strip()


def cpu_seconds_of(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0


class CensusPlugin:
    """Each process that runs tests counts; the one that hands them out adds up, and fails beyond the budget."""

    def __init__(self, counts_here: bool) -> None:
        self._census = Census(os.getpid()) if counts_here else None
        self._total: Counter[str] = Counter()
        self._programs: Counter[str] = Counter()
        if self._census is not None:
            self._census.start()

    @pytest.hookimpl(wrapper=True, trylast=True)  # before the summary is printed
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        yield  # fixtures have ended
        if self._census is not None:
            self._census.end()
            found = self._census.counts(), dict(self._census.programs())
            if hasattr(session.config, "workeroutput"):
                session.config.workeroutput["census"] = found
            self._add(*found)
        if self.exceeded() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._add(*getattr(node, "workeroutput", {}).get("census", ({}, {})))

    def _add(self, counts: dict[str, int], programs: dict[str, int]) -> None:
        self._total.update(counts)
        self._programs.update(programs)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        counts = ", ".join(f"{self._total[kind]} {kind} (of {most})" for kind, most in BUDGET.items())
        terminalreporter.write_line(f"started: {counts}")
        for kind in self.exceeded():
            terminalreporter.write_line(
                f"ERROR: {self._total[kind]} {kind} were started, and the budget is {BUDGET[kind]} "
                "(tests/process_census.py): share what another test starts, or move a test to `campaign`"
            )
        if self.exceeded():
            terminalreporter.write_line(f"the most frequent programs: {self._programs.most_common(12)}")

    def exceeded(self) -> list[str]:
        return [kind for kind, most in BUDGET.items() if self._total[kind] > most]
