"""Faults of a cluster's nodes: lost, lost for a while, and back."""

import random
import time

from chaos_moment_faults import wait_for_checkpoint
from chaos_run import ChaosRun


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
    wait_for_checkpoint(run)
    run.cluster.lose_head()
    started = time.monotonic()
    status = run.wait_for_end(300.0)
    seconds = time.monotonic() - started
    if status == 0:
        run.wrong.append("exit status 0")
    run.cluster.stop()
    run.cluster.start()
    run.resume()
    return f"the head was lost in a checkpoint; the driver ended with status {status} after {seconds:.0f} s"
