"""Faults of the run's files: no room, errors, writes that hang, a power cut, and damage."""

import contextlib
import errno
import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
from chaos_process_faults import Inject, for_a_while, hang, signalled
from chaos_run import INTERRUPTED, ChaosRun, wait_until_gone

from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.run.signals import CLEAN_UP_S


def fill_disk(run: ChaosRun, draw: random.Random) -> str | None:
    """Limit the size of files of these processes, which needs no disk: writing fails with EFBIG."""
    seconds, num_bytes = draw.uniform(2.0, 4.0), draw.randint(1, 100)
    names = [name for name in run.actors() if name.startswith(("buffer", "learner"))]
    found = [psutil.Process(run.driver_pid), *map(run.actor, names)]
    with limited_files([process for process in found if process], num_bytes):
        time.sleep(seconds)
    return f"no file longer than {num_bytes} bytes for {seconds:.1f} s"


@contextlib.contextmanager
def limited_files(processes: Sequence[psutil.Process], num_bytes: int) -> Iterator[None]:
    """Let these processes write no file beyond `num_bytes` bytes."""
    limited = [process for process in processes if _limit_files(process, num_bytes)]
    try:
        yield
    finally:
        for process in limited:
            _limit_files(process, None)


def _limit_files(process: psutil.Process, num_bytes: int | None) -> bool:
    try:
        _, hard = process.rlimit(resource.RLIMIT_FSIZE)
        process.rlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))
    except psutil.NoSuchProcess:
        return False
    return True


def full_disk(run: ChaosRun, draw: random.Random) -> str:
    assert run.disk is not None
    return for_a_while(run.disk.fill, run.disk.empty, draw.uniform(3.0, 6.0), "not one free block")


def frozen_disk(run: ChaosRun, draw: random.Random) -> str:
    """Let every write hang for longer than a sync's phase and the stall watch allow."""
    assert run.disk is not None
    seconds = max(run.config.weight_sync.phase_timeout_s, run.config.recovery.stall_timeout_s) + 3.0
    return for_a_while(run.disk.freeze, run.disk.thaw, seconds, "every write hung")


def ended_on_frozen_disk(run: ChaosRun, draw: random.Random, number: int) -> str:
    """End the driver while writes hang: it must be gone by its deadline, and with it all that it started.

    Until the thaw the kernel keeps a thread that waits for the disk, even after SIGKILL. Such a process counts
    as gone: the driver once its main thread has ended, the others also while they wait for the disk.
    """
    assert run.disk is not None
    processes, driver = run.processes(), psutil.Process(run.driver_pid)
    run.disk.freeze()
    try:
        time.sleep(1.0)
        started = time.monotonic()
        run.signal(number)
        allowed = run.config.run.on_preemption_s + CLEAN_UP_S
        if wait_until_gone([driver], allowed):
            run.wrong.append(f"the driver did not end within {allowed:g} s while writes hung")
        seconds = time.monotonic() - started
        left = wait_until_gone(processes, 30.0, waiting_counts=False)
        run.wrong += [f"process {process.pid} was still there while writes hung" for process in left]
    finally:
        run.disk.thaw()
    status = run.wait_for_end(60.0)
    if status not in (INTERRUPTED, -signal.SIGKILL):
        run.wrong.append(f"exit status {status} instead of {INTERRUPTED}: {run.last_words()}")
    run.wrong += [f"process {process.pid} was still there" for process in wait_until_gone(processes, 60.0)]
    name = signal.Signals(number).name
    return f"{name} while every write hung; the driver ended after {seconds:.1f} s with status {status}"


def covered(run: ChaosRun, draw: random.Random, error: int | None) -> str:
    """Hide the run's folder behind a file system that answers with an error, or not at all."""
    assert run.disk is not None
    seconds = draw.uniform(2.0, 4.0) if error else run.config.recovery.stall_timeout_s + 3.0
    begin, end = partial(run.disk.cover, run.path, error), partial(run.disk.uncover, run.path)
    what = f"failed with {errno.errorcode[error]}" if error else "hung"
    return for_a_while(begin, end, seconds, f"every access to the run's folder {what}")


def read_only(run: ChaosRun, draw: random.Random) -> str:
    assert run.disk is not None
    begin, end = partial(run.disk.make_read_only, run.path), partial(run.disk.make_writable, run.path)
    return for_a_while(begin, end, draw.uniform(3.0, 5.0), "the run's folder was read-only")


def power_cut(run: ChaosRun, draw: random.Random) -> str:
    """Lose what is not on the disk, and every process; then start again from what there is."""
    assert run.disk is not None
    processes = run.processes()
    before = run.last_step()
    run.disk.cut_power()
    run.signal(signal.SIGKILL)
    run.wait_for_end(60.0)
    for process in processes:
        signalled(process, signal.SIGKILL)
    run.disk.restore_power()
    lost = f"the lines of steps {run.last_step() + 1} to {before} were lost"
    return f"the disk and all processes lost their power; {lost}"


# Damage


def with_driver_down(run: ChaosRun, draw: random.Random, change: Inject) -> str:
    """Kill the driver once there is a checkpoint, and change files before it is resumed."""
    _newest(run)
    run.kill()
    return f"SIGKILL to the driver; {change(run, draw)}"


def _newest(run: ChaosRun) -> Path:
    """Wait for a checkpoint; return the newest."""
    store = CheckpointStore(run.run)
    run.wait_for(lambda: bool(store.all()), 120.0, "a checkpoint")
    return store.all()[-1].path


def damage(run: ChaosRun, draw: random.Random) -> str:
    """Damage a file of the newest checkpoint: half of it, empty or gone."""
    newest = _newest(run)
    file = draw.choice([path for path in sorted(newest.rglob("*")) if path.is_file()])
    how = draw.choice(["half", "empty", "gone"])
    if how == "gone":
        file.unlink()
    else:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 2 if how == "half" else 0)
    return f"{file.relative_to(newest.parent)} was {how}"


def flip(run: ChaosRun, draw: random.Random) -> str:
    """Change the first bytes of the newest checkpoint's weights; its size stays."""
    file = _newest(run) / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(draw.randrange(256) for _ in range(6)))  # the length of the header
    return f"the first bytes of {file.relative_to(run.run.checkpoints)} were random"


def half_lines(run: ChaosRun, draw: random.Random) -> str:
    """Append half a line to each log, as a killed writer leaves it."""
    for path in (run.run.metrics_path, run.run.evaluations_summary_path, run.run.events_path):
        with path.open("ab") as file:
            file.write(b'{"step": 1, "half')
    return "half a line at the end of every log"


def delete_logs(run: ChaosRun, draw: random.Random) -> str:
    """Delete logs/ without the files that tell this program which process is which."""
    for path in run.run.logs.glob("*.log"):
        path.unlink()
    return "the logs were deleted"


def empty_pids(run: ChaosRun, draw: random.Random) -> str | None:
    """Hang a Generator, after emptying the files that name each actor's process, as a full disk leaves them."""
    since = time.time()
    said = hang(run, draw, "generator")
    texts = {path: path.read_text() for path in run.run.logs.glob("*.pid")}
    for path in texts:
        path.write_text("")
    run.wait_for(lambda: bool(run.events(since, "generator_back", "restored")), 600.0, "a replacement")
    for path, text in texts.items():  # this program needs them, too
        if not path.read_text():
            path.write_text(text)
    return said and f"{said}, with empty pid files"


def delete_checkpoint(run: ChaosRun, draw: random.Random) -> str:
    """Delete the newest checkpoint, and kill the Learner, which would have gone back to it."""
    newest = _newest(run)
    shutil.rmtree(newest)
    learner = run.actor("learner")
    if learner is not None:
        signalled(learner, signal.SIGKILL)
    return f"{newest.name} was deleted; SIGKILL to learner"
