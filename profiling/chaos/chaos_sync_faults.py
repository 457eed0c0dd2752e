"""Faults in the middle of a weight sync: of a Generator in a phase that is drawn, and of its bytes on the way.

After each of `stop` and `fail`, the event of the failure must name the call: `stage`, or `switch` for the other
phases.
"""

import random

from chaos_process_faults import Inject
from chaos_run import ChaosRun

PHASES = ("stage", "pause", "load", "finish", "resume")
SAYS = {"kill": "", "stop": "did not finish", "fail": "failed in"}


def in_phase(kind: str, phase: str) -> Inject:
    """Kill or stop a Generator, or let it fail, as it begins a phase of the next sync."""

    def inject(run: ChaosRun, draw: random.Random) -> str:
        if SAYS[kind]:
            where = "`stage`" if phase == "stage" else "`switch`"
            if kind == "fail" and phase != "stage":
                where += f": phase `{phase}`"
            run.must_say.append(("generator_failed", rf"^weight sync: generator-\d {SAYS[kind]} {where}"))
        return _triggered(run, f"{kind}_sync_{phase}")

    return inject


def flip_bits(run: ChaosRun, draw: random.Random) -> str:
    """Let the weights arrive with another checksum than theirs."""
    run.must_say.append(("generator_failed", r"did not arrive complete"))
    return _triggered(run, "flip_sync_bits")


def sending(what: str) -> Inject:
    """Kill the Learner, or close the wire, between two chunks of a version on its way."""

    def inject(run: ChaosRun, draw: random.Random) -> str:
        return _triggered(run, f"{what}_sending")

    return inject


def _triggered(run: ChaosRun, name: str) -> str:
    trigger = run.triggers / name
    trigger.touch()
    run.wait_for(lambda: not trigger.exists(), 300.0, name, 0.01)
    return name
