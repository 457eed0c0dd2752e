"""CPU time on this machine while a run lasts: the run's own, its engines', and that of other programs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

PERIOD_S = 0.5
ENGINE = ("ray::Generator", "VLLM::")  # how the names of an engine's processes begin


@dataclass(frozen=True)
class Sample:
    """CPU seconds between two moments, in seconds since the epoch."""

    begin: float
    end: float
    all_s: float
    own_s: float
    engines_s: float


class CpuLog:
    """The samples of one run."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def others(self, begin: float, end: float) -> float:
        """Return the mean number of cores that other programs used."""
        return max(0.0, self._sum("all_s", begin, end) - self._sum("own_s", begin, end)) / (end - begin)

    def engines_s(self, begin: float, end: float) -> float:
        """Return the CPU seconds of the run's engines."""
        return self._sum("engines_s", begin, end)

    def _sum(self, name: str, begin: float, end: float) -> float:
        total = 0.0
        for sample in self._samples:
            shared_s = min(end, sample.end) - max(begin, sample.begin)
            if shared_s > 0:
                total += getattr(sample, name) * shared_s / (sample.end - sample.begin)
        return total


def read_cpu_log(path: Path) -> CpuLog:
    return CpuLog([Sample(**json.loads(line)) for line in path.read_text().splitlines()])


@contextmanager
def logging_cpu(pid: int, path: Path) -> Iterator[None]:
    """Sample the machine and the process with all its descendants into a file, while the block lasts."""
    stopped = threading.Event()
    thread = threading.Thread(target=_log, args=(pid, path, stopped))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _log(pid: int, path: Path, stopped: threading.Event) -> None:
    before = _read(pid)
    with path.open("w") as file:
        while not stopped.wait(PERIOD_S):
            after = _read(pid)
            spent = {p: s - before[2].get(p, (0.0, ""))[0] for p, (s, _) in after[2].items()}
            engines = (s for p, s in spent.items() if after[2][p][1].startswith(ENGINE))
            sample = Sample(before[0], after[0], after[1] - before[1], sum(spent.values()), sum(engines))
            file.write(json.dumps(asdict(sample)) + "\n")
            before = after


def _read(pid: int) -> tuple[float, float, dict[int, tuple[float, str]]]:
    """Return the time, the machine's CPU seconds, and those of each process with its name."""
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    processes: dict[int, tuple[float, str]] = {}
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        family = []
    for process in family:
        try:
            spent = process.cpu_times()
            processes[process.pid] = spent.user + spent.system, " ".join(process.cmdline())
        except psutil.Error:
            continue
    return time.time(), busy, processes
