"""Faults at a bad moment: while the run starts, restores, replaces an actor or writes a checkpoint."""

import random
import signal
import time
from collections.abc import Callable

from chaos_process_faults import Inject, interrupted, kill, signalled
from chaos_run import INTERRUPTED, ChaosRun

RESTORED = "restored"


def _while_restoring(run: ChaosRun, draw: random.Random) -> None:
    """Kill the Learner, and wait for a moment of the restore that follows."""
    since = time.time()
    kill("learner")(run, draw)
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


def interrupt_restore(run: ChaosRun, draw: random.Random) -> str:
    _while_restoring(run, draw)
    said = interrupted(run)
    run.resume()
    return f"SIGKILL to learner; during the restore {said}"


def kill_restore(run: ChaosRun, draw: random.Random) -> str:
    _while_restoring(run, draw)
    said = run.kill()
    run.resume()
    return f"SIGKILL to learner; during the restore to the driver; {said}"


def interrupt_start(run: ChaosRun, draw: random.Random) -> str:
    run.kill()
    run.resume()
    seconds = draw.uniform(3.0, 12.0)
    time.sleep(seconds)
    said = interrupted(run, (INTERRUPTED, -signal.SIGTERM))  # as for any program that is still importing
    run.resume()
    return f"{seconds:.1f} s after the start {said}"


def kill_start(run: ChaosRun, draw: random.Random) -> str:
    run.kill()
    run.resume()
    seconds = draw.uniform(3.0, 12.0)
    time.sleep(seconds)
    said = run.kill()
    run.resume()
    return f"{seconds:.1f} s after the start SIGKILL to the driver; {said}"


def wait_for_checkpoint(run: ChaosRun) -> None:
    """Wait until a checkpoint is being written."""
    run.wait_for(lambda: any(run.run.checkpoints.glob("unfinished-*")), 120.0, "a checkpoint", 0.002)


def _while_writing(then: Callable[[ChaosRun], str]) -> Inject:
    """Act while a checkpoint is being written."""

    def inject(run: ChaosRun, draw: random.Random) -> str:
        wait_for_checkpoint(run)
        said = then(run)
        run.resume()
        return f"while a checkpoint was written {said}"

    return inject


interrupt_checkpoint = _while_writing(interrupted)
kill_checkpoint = _while_writing(lambda run: f"SIGKILL to the driver; {run.kill()}")


def hang_replacement(actor: str) -> Inject:
    """Kill an actor, and let its replacement hang as it starts."""

    def inject(run: ChaosRun, draw: random.Random) -> str | None:
        (run.triggers / f"hang_{actor}_start").touch()
        said = kill(actor)(run, draw)
        return said and f"{said}, and its replacement hung as it started"

    return inject


def poison_prompt(run: ChaosRun, draw: random.Random) -> str:
    """Have the next prompt end the process that plays it, again and again, until it is set aside."""
    since, path = time.time(), run.triggers / "poison_prompt"
    path.touch()
    run.wait_for(lambda: bool(run.events(since, "set_aside")), 300.0, "a prompt that is set aside")
    path.unlink()
    return "one prompt ended its process until it was set aside"


def jump_clock(run: ChaosRun, draw: random.Random) -> str:
    """Let the wall clock of the driver and of the actors jump an hour ahead, and back."""
    seconds = draw.uniform(3.0, 6.0)
    run.clock.write_text("3600")
    time.sleep(seconds)
    run.clock.unlink()
    return f"the wall clock was an hour ahead for {seconds:.1f} s, then back"


def trigger(name: str) -> Inject:
    """Request a fault from inside: see profiling/chaos/chaos_driver.py."""

    def inject(run: ChaosRun, draw: random.Random) -> str:
        (run.triggers / name).touch()
        return name

    return inject
