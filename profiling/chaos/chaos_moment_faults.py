"""Faults at a bad moment: of a start, a restore, a checkpoint, a rank's work, a weight sync, or of nodes.

After a fault of a Learner's rank the event of the failure must name the rank, its node and the cause, and every
process that was a rank before it must be gone. After `stop` and `fail` of a Generator in a sync the event must
name the call: `stage`, or `switch` for the other phases.
"""

import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial

from chaos_disk_faults import limited_files
from chaos_process_faults import Inject, for_a_while, interrupt, kill, pick, signalled
from chaos_run import ChaosRun

RESTORED = "restored"
STAGES = ("forward", "backward", "optimizer", "snapshot", "capture", "write_shards", "write_model")
CAUSES = {"kill": "its worker process has died", "stop": "no answer", "oom": "chaos: out of memory in"}
HALVES = ("forward", "backward")  # these stages' memory depends on the micro-batch
PLACE = r"on \d+\.\d+\.\d+\.\d+"
PHASES = ("stage", "pause", "load", "finish", "resume")
SAYS = {"kill": "", "stop": "did not finish", "fail": "failed in"}


def _while_restoring(run: ChaosRun, draw: random.Random) -> None:
    """Kill the Learner, and wait for a moment of the restore that follows."""
    since = time.time()
    kill(run, draw, "learner")
    run.wait_for(lambda: bool(run.events(since, RESTORED)), 120.0, "a restore")
    time.sleep(draw.uniform(0.0, 10.0))


def die_again(run: ChaosRun, draw: random.Random) -> str:
    name = draw.choice([name for name in run.actors() if name.startswith("learner")])  # one of its ranks
    before = run.actor(name)
    _while_restoring(run, draw)
    run.wait_for(lambda: run.actor(name) not in (None, before), 120.0, "another Learner")
    learner = run.actor(name)
    assert learner is not None
    signalled(learner, signal.SIGKILL)
    return f"SIGKILL to learner, and to the next {name} while the actors started"


def restore(run: ChaosRun, draw: random.Random) -> str:
    _while_restoring(run, draw)
    return "SIGKILL to learner; during the restore"


def start(run: ChaosRun, draw: random.Random) -> str:
    run.kill()
    run.resume()
    seconds = draw.uniform(3.0, 12.0)
    time.sleep(seconds)
    return f"{seconds:.1f} s after the start"


def checkpoint(run: ChaosRun, draw: random.Random) -> str:
    run.wait_for(lambda: any(run.run.checkpoints.glob("unfinished-*")), 120.0, "a checkpoint", 0.002)
    return "while a checkpoint was written"


def ended(
    run: ChaosRun, draw: random.Random, moment: Callable[[ChaosRun, random.Random], str], end: Inject
) -> str:
    """Wait for a moment, and end the driver then."""
    return f"{moment(run, draw)} {end(run, draw)}"


def hang_replacement(run: ChaosRun, draw: random.Random, actor: str) -> str | None:
    """Kill an actor, and let its replacement hang as it starts."""
    (run.triggers / f"hang_{actor}_start").touch()
    said = kill(run, draw, actor)
    return said and f"{said}, and its replacement hung as it started"


def poison_prompt(run: ChaosRun, draw: random.Random) -> str:
    """Have the next prompt end the process that plays it, again and again, until it is set aside."""
    since, path = time.time(), run.triggers / "poison_prompt"
    path.touch()
    run.wait_for(lambda: bool(run.events(since, "set_aside")), 300.0, "a prompt that is set aside")
    path.unlink()
    return "one prompt ended its process until it was set aside"


def jump_clock(run: ChaosRun, draw: random.Random) -> str:
    """Let the wall clock of the driver and of the actors jump an hour ahead, and back."""
    begin = partial(run.clock.write_text, "3600")
    return for_a_while(begin, run.clock.unlink, draw.uniform(3.0, 6.0), "the wall clock was an hour ahead")


def trigger(run: ChaosRun, draw: random.Random, name: str) -> str:
    """Request a fault from inside: see profiling/chaos/chaos_driver.py."""
    (run.triggers / name).touch()
    return name


def request(run: ChaosRun, draw: random.Random, name: str) -> str:
    """Request a fault from inside, and wait until it has happened."""
    trigger = run.triggers / name
    trigger.touch()
    run.wait_for(lambda: not trigger.exists(), 300.0, name, 0.01)
    return name


# Ranks of the Learner


def at_stage(run: ChaosRun, draw: random.Random, kind: str, stage: str) -> str | None:
    """Kill or stop a rank, or let it run out of memory, at its next work of this kind."""
    picked = pick(run, draw, "learner-")
    if picked is None:
        return None
    name, cause = picked[0], re.escape(CAUSES[kind])
    run.must_say.append(("run_failed", rf"^learner died: (.*; )?{name} {PLACE}: [^;]*{cause}"))
    if kind == "oom" and stage in HALVES:
        run.must_say.append(("learner_out_of_memory", r"continues with learner\.micro_batch_tokens \d+"))
    _must_all_end(run)
    request(run, draw, f"{kind}_rank_{name.rpartition('-')[2]}_{stage}")
    return f"{kind} of {name} at {stage}"


def pause_rank(run: ChaosRun, draw: random.Random) -> str | None:
    """Stop a rank for longer than a collective may take: then both ranks' collectives fail."""
    picked, seconds = (
        pick(run, draw, "learner-"),
        run.config.learner.collective_timeout_s + draw.uniform(1.0, 4.0),
    )
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
    said = at_stage(run, draw, "stop", draw.choice(("forward", "backward")))
    if said is None:
        return None
    time.sleep(draw.uniform(1.0, 5.0))
    run.must_say = []  # a run that was stopped is not restored
    return f"{said}; {interrupt(run, draw)}"


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


# Weight syncs


def in_phase(run: ChaosRun, draw: random.Random, kind: str, phase: str) -> str:
    """Kill or stop a Generator, or let it fail, as it begins a phase of the next sync."""
    if SAYS[kind]:
        where = "`stage`" if phase == "stage" else "`switch`"
        if kind == "fail" and phase != "stage":
            where += f": phase `{phase}`"
        run.must_say.append(("generator_failed", rf"^weight sync: generator-\d {SAYS[kind]} {where}"))
    return request(run, draw, f"{kind}_sync_{phase}")


def flip_bits(run: ChaosRun, draw: random.Random) -> str:
    """Let the weights arrive with another checksum than theirs."""
    run.must_say.append(("generator_failed", r"did not arrive complete"))
    return request(run, draw, "flip_sync_bits")


# Nodes


def _busy_node(run: ChaosRun, draw: random.Random) -> tuple[int, list[str]] | None:
    """Draw a node that hosts actors; return its number and their names."""
    assert run.cluster is not None
    by_node: dict[int, list[str]] = {}
    for name in run.actors():
        process = run.actor(name)
        node = run.cluster.hosts(process) if process else None
        if node is not None:
            by_node.setdefault(node, []).append(name)
    return draw.choice(sorted(by_node.items())) if by_node else None


def lose_node(run: ChaosRun, draw: random.Random) -> str | None:
    """Lose a node with actors, for which there is room elsewhere; a fresh one joins after the recovery."""
    found = _busy_node(run, draw)
    if found is None or run.cluster is None:
        return None
    node, names = found
    since, step = time.time(), run.last_step()
    run.cluster.lose(node)
    known = ("restored", "generator_back", "scorer_back")
    run.wait_for(lambda: bool(run.events(since, *known)), 240.0, "a reaction to the lost node")
    run.wait_for(lambda: run.last_step() > step, 240.0, "a step without the node")
    run.cluster.rejoin(node)
    time.sleep(5.0)
    return f"node {node} with {', '.join(names)} was lost; another joined later"


def lose_node_for_a_while(run: ChaosRun, draw: random.Random) -> str | None:
    """Lose every further node; there is no room elsewhere until one joins again."""
    if run.cluster is None or _busy_node(run, draw) is None:
        return None
    for node in range(run.cluster.num_nodes):
        run.cluster.lose(node)
    seconds = draw.uniform(15.0, 25.0)
    time.sleep(seconds)
    for node in range(run.cluster.num_nodes):
        run.cluster.rejoin(node)
    return f"{run.cluster.num_nodes} nodes were lost, and others joined {seconds:.0f} s later"


def lose_head_in_checkpoint(run: ChaosRun, draw: random.Random) -> str | None:
    """Lose the head node's Ray while a checkpoint is written; the run must end by itself."""
    if run.cluster is None:
        return None
    checkpoint(run, draw)
    run.cluster.lose_head()
    started = time.monotonic()
    status = run.wait_for_end(300.0)
    seconds = time.monotonic() - started
    if status == 0:
        run.wrong.append("exit status 0")
    run.cluster.stop()
    run.cluster.start()
    return f"the head was lost in a checkpoint; the driver ended with status {status} after {seconds:.0f} s"
