"""The faults that profiling/chaos.py injects, by means of the operating system where possible."""

import contextlib
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
from chaos_run import INTERRUPTED, ChaosRun

# Outcomes by the event that reports them; RODE_THROUGH has no event.
OUTCOMES = {"restored": "restored", "generator_back": "replaced", "scorer_back": "replaced"}
OUTCOMES |= {"update_skipped": "skipped and counted", "set_aside": "set aside"}
RODE_THROUGH, RESUMED, COUNTED = "rode through", "resumed", "counted"


@dataclass(frozen=True)
class Fault:
    """One kind of fault; `inject` returns what it did when it is done, or None if it could not."""

    name: str
    inject: Callable[[ChaosRun, random.Random], str | None]
    outcomes: tuple[str, ...]  # one of these must follow if the fault is alone
    event: str | None = None  # reports that the run has handled it
    ends_driver: bool = False


def _signal(process: psutil.Process, number: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return True
    return False


def _pick(run: ChaosRun, draw: random.Random, prefix: str = "") -> tuple[str, psutil.Process] | None:
    """Draw an actor that is not stopped and has a name with this prefix."""
    found = [(name, run.actor(name)) for name in run.actors() if name.startswith(prefix)]
    present = [(name, process) for name, process in found if process and process not in run.stopped]
    return draw.choice(present) if present else None


def _kill(prefix: str) -> Callable[[ChaosRun, random.Random], str | None]:
    def inject(run: ChaosRun, draw: random.Random) -> str | None:
        picked = _pick(run, draw, prefix)
        return f"SIGKILL to {picked[0]}" if picked and _signal(picked[1], signal.SIGKILL) else None

    return inject


def _kill_worker(run: ChaosRun, draw: random.Random) -> str | None:
    """Kill a process that an actor started."""
    for prefix in draw.sample(["generator", "scorer"], 2):
        picked = _pick(run, draw, prefix)
        for child in picked[1].children() if picked else []:
            is_pythons_own = any("resource_tracker" in word for word in child.cmdline())
            if not is_pythons_own and _signal(child, signal.SIGKILL):
                time.sleep(2.0)  # until the actor notices
                return f"SIGKILL to a child of {picked[0]}"  # type: ignore[index]
    return None


def _hang(prefix: str) -> Callable[[ChaosRun, random.Random], str | None]:
    def inject(run: ChaosRun, draw: random.Random) -> str | None:
        picked = _pick(run, draw, prefix)
        if picked is None or not _signal(picked[1], signal.SIGSTOP):
            return None
        run.stopped.append(picked[1])
        return f"SIGSTOP to {picked[0]}"

    return inject


def _delay(run: ChaosRun, draw: random.Random) -> str | None:
    seconds, picked = draw.uniform(0.5, 2.0), _pick(run, draw)
    if picked is None or not _signal(picked[1], signal.SIGSTOP):
        return None
    time.sleep(seconds)
    _signal(picked[1], signal.SIGCONT)
    return f"{picked[0]} stopped for {seconds:.1f} s"


def _fill_disk(run: ChaosRun, draw: random.Random) -> str | None:
    """Limit the size of files of these processes: writing fails with EFBIG, as with ENOSPC on a full disk."""
    seconds, num_bytes = draw.uniform(2.0, 4.0), draw.randint(1, 100)
    found = [psutil.Process(run.driver_pid), run.actor("buffer"), run.actor("learner")]
    limited = [process for process in found if process and _limit_files(process, num_bytes)]
    time.sleep(seconds)
    for process in limited:
        _limit_files(process, None)
    return f"no file longer than {num_bytes} bytes for {seconds:.1f} s"


def _limit_files(process: psutil.Process, num_bytes: int | None) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        _, hard = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))
        return True
    return False


def _trigger(name: str) -> Callable[[ChaosRun, random.Random], str | None]:
    """Request a fault from inside: see profiling/chaos_driver.py."""

    def inject(run: ChaosRun, draw: random.Random) -> str | None:
        (run.triggers / name).touch()
        return name

    return inject


def _kill_driver(run: ChaosRun, draw: random.Random) -> str | None:
    seconds, left = run.kill()
    run.resume()
    return f"SIGKILL to the driver; {', '.join(left) or 'nothing'} left after {seconds:.1f} s"


def _interrupt(run: ChaosRun, draw: random.Random) -> str | None:
    started = time.monotonic()
    status = run.interrupt()
    seconds = time.monotonic() - started
    run.resume()
    wrong = "" if status == INTERRUPTED else f" instead of {INTERRUPTED}: {run.last_words()}"
    return f"SIGTERM to the driver; exit status {status}{wrong} after {seconds:.1f} s"


REPLACED, RESTORED, SKIPPED = ("replaced",), ("restored",), ("skipped and counted",)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill_generator", _kill("generator"), REPLACED, "generator_back"),
        Fault("kill_scorer", _kill("scorer"), REPLACED, "scorer_back"),
        Fault("kill_buffer", _kill("buffer"), RESTORED, "restored"),
        Fault("kill_learner", _kill("learner"), RESTORED, "restored"),
        Fault("kill_weight_sync", _kill("weight_sync"), RESTORED, "restored"),
        Fault("kill_worker", _kill_worker, (RODE_THROUGH, COUNTED, *REPLACED)),
        Fault("kill_driver", _kill_driver, (RESUMED,), ends_driver=True),
        Fault("interrupt", _interrupt, (RESUMED,), ends_driver=True),
        Fault("hang_generator", _hang("generator"), REPLACED, "generator_back"),
        Fault("hang_learner", _hang("learner"), RESTORED, "restored"),
        Fault("delay", _delay, (RODE_THROUGH,)),
        Fault("fill_disk", _fill_disk, (RODE_THROUGH,)),
        Fault("poison_reward", _trigger("poison_reward"), (COUNTED,)),
        Fault("nan_gradient", _trigger("nan_gradient"), SKIPPED, "update_skipped"),
    )
}


def draws(kinds: list[str], draw: random.Random) -> Iterator[str]:
    """Yield kinds at random without end, each equally often, from a deck that is reshuffled when empty."""
    while True:
        yield from draw.sample(kinds, len(kinds))


def can_meet(first: Fault, second: Fault) -> bool:
    """Return whether two faults may come at once: a driver ends once, and a last checkpoint needs a disk."""
    pair = {first.name, second.name}
    both_end = first.ends_driver and second.ends_driver
    return len(pair) == 2 and not both_end and pair != {"fill_disk", "interrupt"}
