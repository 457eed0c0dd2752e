"""Faults of the Learner's ranks: of one that is drawn, at a stage of its work or at any moment.

After each, the event of the failure must name the rank, its node and the cause, and every process that was a
rank before it must be gone.
"""

import random
import re
import signal
import time

from chaos_disk_faults import limited_files
from chaos_process_faults import Inject, interrupted, pick, signalled
from chaos_run import ChaosRun

STAGES = ("forward", "backward", "optimizer", "snapshot", "capture", "write_shards", "write_model")
CAUSES = {"kill": "its worker process has died", "stop": "no answer", "oom": "chaos: out of memory in"}
HALVES = ("forward", "backward")  # these stages' memory depends on the micro-batch
PLACE = r"on \d+\.\d+\.\d+\.\d+"


def at_stage(kind: str, stage: str) -> Inject:
    """Kill or stop a rank, or let it run out of memory, at its next work of this kind."""

    def inject(run: ChaosRun, draw: random.Random) -> str | None:
        picked = pick(run, draw, "learner-")
        if picked is None:
            return None
        name, cause = picked[0], re.escape(CAUSES[kind])
        run.must_say.append(("run_failed", rf"^learner died: (.*; )?{name} {PLACE}: [^;]*{cause}"))
        if kind == "oom" and stage in HALVES:
            run.must_say.append(("learner_out_of_memory", r"goes on with learner\.micro_batch_tokens \d+"))
        _must_all_end(run)
        trigger = run.triggers / f"{kind}_rank_{name.rpartition('-')[2]}_{stage}"
        trigger.touch()
        run.wait_for(lambda: not trigger.exists(), 300.0, trigger.name, 0.01)
        return f"{kind} of {name} at {stage}"

    return inject


def pause_rank(run: ChaosRun, draw: random.Random) -> str | None:
    """Stop a rank for longer than a collective may take: then both ranks' collectives fail."""
    picked, seconds = pick(run, draw, "learner-"), run.collective_timeout_s + draw.uniform(1.0, 4.0)
    if picked is None:
        return None
    _must_all_end(run)
    run.must_say.append(("run_failed", rf"^learner died: learner-\d {PLACE}: "))
    signalled(picked[1], signal.SIGSTOP)
    time.sleep(seconds)
    signalled(picked[1], signal.SIGCONT)
    return f"{picked[0]} stopped for {seconds:.1f} s"


def stop_ranks(run: ChaosRun, draw: random.Random) -> str | None:
    """Stop all ranks: none is left to wait for another, so the stall watch must notice."""
    _must_all_end(run)
    found = run.must_end
    for process in found:
        signalled(process, signal.SIGSTOP)
    run.must_say.append(("run_failed", r"^stuck for \S+ s: .*learner"))
    return f"SIGSTOP to {len(found)} ranks" if found else None


def interrupt_with_hung_rank(run: ChaosRun, draw: random.Random) -> str | None:
    """Send SIGTERM to the driver while a rank hangs, and another waits for it in a collective."""
    said = at_stage("stop", draw.choice(("forward", "backward")))(run, draw)
    if said is None:
        return None
    time.sleep(draw.uniform(1.0, 5.0))
    run.must_say = []  # a run that was stopped is not restored
    ended = interrupted(run)
    run.resume()
    return f"{said}; {ended}"


def fill_disk_of_rank(run: ChaosRun, draw: random.Random) -> str | None:
    """Let one rank write no file beyond some bytes, in two checkpoints or more."""
    picked, num_bytes = pick(run, draw, "learner-"), draw.randint(1, 100)
    if picked is None:
        return None
    step = run.last_step()
    with limited_files([picked[1]], num_bytes):
        run.wait_for(lambda: run.last_step() >= step + 7, 300.0, "7 steps")
    return f"no file of {picked[0]} longer than {num_bytes} bytes for 7 steps"


def _must_all_end(run: ChaosRun) -> None:
    """Have every rank's process looked for after the recovery."""
    found = [run.actor(name) for name in run.actors() if name.startswith("learner")]
    run.must_end += [process for process in found if process]
