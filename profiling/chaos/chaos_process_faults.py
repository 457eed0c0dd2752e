"""Faults of processes: killed, hung, stopped for a while, out of memory or of files."""

import contextlib
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import psutil
from chaos_memory import full_shared_memory, out_of_memory
from chaos_run import INTERRUPTED, ChaosRun, wait_until_gone

Inject = Callable[[ChaosRun, random.Random], str | None]


def signalled(process: psutil.Process, number: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
        return True
    return False


def pick(run: ChaosRun, draw: random.Random, prefix: str = "") -> tuple[str, psutil.Process] | None:
    """Draw an actor that is not stopped and has a name with this prefix."""
    found = [(name, run.actor(name)) for name in run.actors() if name.startswith(prefix)]
    present = [(name, process) for name, process in found if process and process not in run.stopped]
    return draw.choice(present) if present else None


def kill(run: ChaosRun, draw: random.Random, prefix: str) -> str | None:
    picked = pick(run, draw, prefix)
    return f"SIGKILL to {picked[0]}" if picked and signalled(picked[1], signal.SIGKILL) else None


def hang(run: ChaosRun, draw: random.Random, prefix: str) -> str | None:
    picked = pick(run, draw, prefix)
    if picked is None or not signalled(picked[1], signal.SIGSTOP):
        return None
    run.stopped.append(picked[1])
    return f"SIGSTOP to {picked[0]}"


def for_a_while(begin: Callable[[], object], end: Callable[[], object], seconds: float, said: str) -> str:
    begin()
    time.sleep(seconds)
    end()
    return f"{said} for {seconds:.1f} s"


def _stopped_for(processes: list[psutil.Process], seconds: float) -> None:
    for process in processes:
        signalled(process, signal.SIGSTOP)
    time.sleep(seconds)
    for process in processes:
        signalled(process, signal.SIGCONT)


def delay(run: ChaosRun, draw: random.Random) -> str | None:
    seconds, picked = draw.uniform(0.5, 2.0), pick(run, draw)
    if picked is None:
        return None
    _stopped_for([picked[1]], seconds)
    return f"{picked[0]} stopped for {seconds:.1f} s"


def stop_driver(run: ChaosRun, draw: random.Random) -> str | None:
    seconds = run.config.recovery.stall_timeout_s + draw.uniform(3.0, 8.0)
    _stopped_for([psutil.Process(run.driver_pid)], seconds)
    return f"the driver stopped for {seconds:.1f} s"


def stop_generators(run: ChaosRun, draw: random.Random) -> str | None:
    """Stop all Generators for so long that all fail the same sync."""
    seconds = run.config.weight_sync.phase_timeout_s + draw.uniform(2.0, 4.0)
    names = [name for name in run.actors() if name.startswith("generator")]
    found = [process for name in names if (process := run.actor(name))]
    _stopped_for(found, seconds)
    return f"{len(found)} Generators stopped for {seconds:.1f} s"


# Children of actors


def _child(run: ChaosRun, actor: str, is_leaf: bool) -> psutil.Process | None:
    """Return vLLM's engine, or a grading worker, which its fork server has started."""
    parent = run.actor(actor)
    for child in parent.children(recursive=True) if parent else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            if "resource_tracker" not in " ".join(child.cmdline()) and (not is_leaf or not child.children()):
                return child
    return None


def kill_child(run: ChaosRun, draw: random.Random, actor: str, is_leaf: bool = False) -> str | None:
    child = _child(run, actor, is_leaf)
    if child is None or not signalled(child, signal.SIGKILL):
        return None
    time.sleep(2.0)  # until the actor notices
    return f"SIGKILL to a child of {actor}"


def hang_child(run: ChaosRun, draw: random.Random, actor: str, is_leaf: bool = False) -> str | None:
    child = _child(run, actor, is_leaf)
    if child is None or not signalled(child, signal.SIGSTOP):
        return None
    run.stopped.append(child)
    return f"SIGSTOP to a child of {actor}"


def hang_fork_server(run: ChaosRun, draw: random.Random) -> str | None:
    """Stop the process that starts grading workers, when it has to start one."""
    server = _child(run, "scorer", is_leaf=False)
    if server is None or not signalled(server, signal.SIGSTOP):
        return None
    run.stopped.append(server)
    return (
        f"SIGSTOP to the fork server, SIGKILL to {sum(signalled(w, signal.SIGKILL) for w in server.children())}"
    )


# Memory and files


def kernel_kill(run: ChaosRun, draw: random.Random, prefix: str) -> str | None:
    picked = pick(run, draw, prefix)
    if picked is None:
        return None
    with out_of_memory(picked[1]):
        if wait_until_gone([picked[1]], 30.0):
            run.wrong.append(f"{picked[0]} was still there: the kernel did not kill it")
    return f"{picked[0]} in a memory group of 64 KiB"


def memory_monitor(run: ChaosRun, draw: random.Random, newest: str) -> str | None:
    """Show Ray's monitor a full memory until it kills; the newest is first, so an actor is replaced before."""
    assert run.memory is not None
    since = time.time()
    if newest:
        kill(run, draw, newest)
        back = f"{newest.partition('-')[0]}_back"
        run.wait_for(lambda: bool(run.events(since, back)), 120.0, back)
    before = {name: run.actor(name) for name in run.actors()}
    run.memory.use(0.951)  # Ray kills as many processes as bring it below 0.95
    try:
        run.wait_for(lambda: bool(_ended(before)), 30.0, "a kill by Ray's memory monitor")
    finally:
        run.memory.use(0.2)
    time.sleep(1.0)
    return f"Ray's memory monitor killed {', '.join(_ended(before))}"


def _ended(processes: dict[str, psutil.Process | None]) -> list[str]:
    return [name for name, process in processes.items() if process and wait_until_gone([process], 0.0) == []]


def full_shm(run: ChaosRun, draw: random.Random) -> str:
    """Leave no page in /dev/shm, where Ray's objects lie."""
    seconds = draw.uniform(3.0, 6.0)
    with full_shared_memory():
        time.sleep(seconds)
    return f"not one free page in /dev/shm for {seconds:.1f} s"


def few_files(run: ChaosRun, draw: random.Random) -> str | None:
    """Leave the Scorer no file to open for a while."""
    process, seconds = run.actor("scorer"), draw.uniform(2.0, 4.0)
    if process is None:
        return None
    soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.rlimit(resource.RLIMIT_NOFILE, (3, hard))
        time.sleep(seconds)
        process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return f"the Scorer could open no file for {seconds:.1f} s"


# The driver


def kill_driver(run: ChaosRun, draw: random.Random) -> str:
    return f"SIGKILL to the driver; {run.kill()}"


def hang_up(run: ChaosRun, draw: random.Random) -> str:
    return f"SIGHUP to the driver, as from a closed terminal; {run.kill(signal.SIGHUP)}"


def interrupt(run: ChaosRun, draw: random.Random, allowed: Sequence[int] = (INTERRUPTED,)) -> str:
    """Send SIGTERM to the driver, which must end with such a status, and nothing may be left."""
    with run.gone_afterwards() as gone:
        started = time.monotonic()
        status = run.interrupt()
        seconds = time.monotonic() - started
    if status not in allowed:
        run.wrong.append(f"exit status {status} instead of {INTERRUPTED}: {run.last_words()}")
    return f"SIGTERM to the driver; it ended after {seconds:.1f} s; {gone[0]}"


def interrupt_twice(run: ChaosRun, draw: random.Random) -> str:
    with run.gone_afterwards() as gone:
        run.signal(signal.SIGTERM)
        time.sleep(draw.uniform(0.2, 0.6))
        with contextlib.suppress(ProcessLookupError):
            run.signal(signal.SIGTERM)
        started = time.monotonic()
        run.wait_for_end(30.0)
    return f"SIGTERM twice to the driver; it ended {time.monotonic() - started:.1f} s later; {gone[0]}"


def second_driver(run: ChaosRun, draw: random.Random) -> str:
    """Resume the run that is being trained: it must be refused, with a message that names the reason."""
    log = run.folder / "second.log"
    log.unlink(missing_ok=True)
    try:
        status = run.launch("resume", str(run.path), log=log).wait(90)
    except subprocess.TimeoutExpired:
        run.wrong.append("a second driver was not refused")
        return "a second driver"
    text = log.read_text().strip()
    if status == 0 or "another process" not in text or "Traceback" in text:
        run.wrong.append(f"a second driver ended with status {status}: {text[-300:]}")
    return f"a second driver; refused: {text.splitlines()[-1][:120] if text else ''}"


def rays_own(run: ChaosRun, draw: random.Random, name: str) -> str | None:
    """Kill one of Ray's own processes on the driver's node; the run cannot continue, and must end by itself."""
    found = [process for process in run.processes() if _program(process) == name]
    if not found:
        return None
    with run.gone_afterwards() as gone:
        signalled(found[0], signal.SIGKILL)
        started = time.monotonic()
        status = run.wait_for_end(180.0)
        seconds = time.monotonic() - started
    if status == 0:
        run.wrong.append("exit status 0")
    return f"SIGKILL to {name}; the driver ended with status {status} after {seconds:.1f} s; {gone[0]}"


def _program(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        return str(process.cmdline()[0]).rpartition("/")[2]
    return ""
