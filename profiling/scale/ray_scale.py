"""Real runs on real Ray with hundreds of simulated engines, on nodes that all are this machine.

    python profiling/scale/ray_scale.py --engines 256 --processes 32 --nodes 8 --minutes 3

The engines, the Learner and the Scorers only wait (grpo_ray/tools/simulation); everything else is the run's
own. Processes, each with several engines, and whole nodes are killed while it trains. At the end it prints the
delay of the driver's event loop, its CPU time and memory, and an account of the prompts; see docs/lab/scale.md.
Exits with 1 if a token was too old, or a prompt was lost or repeated.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import ceil, floor
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from grpo_ray.cluster.reaper import process_at
from grpo_ray.records.run_files import RunDirectory, last_logged_step
from grpo_ray.tools.arguments import above_zero, natural, positive
from grpo_ray.watch.event_loop import LoopLag

HERE = Path(__file__).parent
DRIVER = HERE / "ray_scale_driver.py"
QUICKSTART = str(HERE.parents[1] / "configs" / "quickstart.yaml")
DEATHS_PER_MINUTE = 0.01  # of each process and of each node
REJOIN_S = 5.0  # from a node's death to a new one in its place
SPEEDS: dict[str, float] = {"start_s": 2.0, "stage_s": 1.0, "load_s": 0.2, "snapshot_s": 0.2, "train_s": 2.0}
CHANGES = [
    "algorithm.samples_per_prompt=8", "algorithm.num_steps=10000", "sampling.max_tokens=2048",
    "generator.max_num_seqs=64", "placement.strategy=spread", "placement.wait_s=180",
    "learner.num_cpus=0", "weight_sync.max_lag=2", "weight_sync.in_flight=true", "run.save_rollouts=false",
    "evaluation.every_num_steps=1000000", "checkpoint.every_num_steps=5",
    "recovery.max_restarts=10000", "recovery.max_restores=100",
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One run, in plain values."""

    config: str
    overrides: list[str]
    speeds: dict[str, float]
    length_mean: float  # tokens
    num_nodes: int
    per_process: int
    training_s: float
    """Seconds of training, after which the run stops as after Ctrl-C."""
    profile: str | None = None
    """File for the profile of the event loop's thread."""


@dataclass
class Measured:
    """The result of one run."""

    num_steps: int = 0
    num_groups: int = 0  # trained
    nodes_s: float = 0.0  # until all nodes had joined
    start_s: float = 0.0  # from the first actor's start until all were ready
    training_s: float = 0.0
    loop_lag_s: float = 0.0
    """99th percentile of the delays of the driver's event loop, over the whole training."""
    step_lags_s: list[float] = field(default_factory=list)
    """The metric `perf/loop_lag_s` of each step."""
    driver_cpu_s: float = 0.0  # of the training, all threads
    driver_bytes: int = 0
    process_bytes: list[int] = field(default_factory=list)  # of each process of engines
    num_stale: int = -1
    num_lost: int = -1
    num_repeated: int = -1
    num_restarts: int = 0
    num_restores: int = 0
    num_retried: int = 0


OPTIONS: Mapping[str, Any] = {"object_store_memory": 200 * 2**20, "include_dashboard": False}
SETTINGS: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    # A killed node does not answer at all; one that is short of CPUs answers health checks late.
    "RAY_health_check_initial_delay_ms": "10000", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000", "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "180", "RAY_agent_register_timeout_ms": "120000",
}  # fmt: skip


class Nodes:
    """A head node, where the driver runs, and further nodes with room for all actors on half of them.

    They are Ray nodes on this machine, by Ray's own `cluster_utils`: cheaper to start than those of chaos.
    """

    def __init__(self, num_nodes: int, settings: Mapping[str, str]) -> None:
        """
        Args:
            settings: environment variables of the nodes, and of this process from now on.
        """
        self._environment = {**SETTINGS, "RAY_AUTH_TOKEN": secrets.token_hex(32), **settings}
        os.environ.update(self._environment)  # before Ray is imported, which reads it once
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **OPTIONS})
        self._nodes: list[Any] = [self._join() for _ in range(num_nodes)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a driver of this cluster."""
        return {**self._environment, "RAY_ADDRESS": str(self._cluster.address)}

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def lose(self, index: int) -> None:
        """Kill a node with everything on it, as if its power were cut."""
        node, self._nodes[index] = self._nodes[index], None
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def is_up(self, index: int) -> bool:
        return self._nodes[index] is not None

    def rejoin(self, index: int) -> None:
        self._nodes[index] = self._join()

    def close(self) -> None:
        self._cluster.shutdown()

    def _join(self) -> Any:
        return self._cluster.add_node(wait=False, num_cpus=1, **OPTIONS)


class Deaths:
    """Processes and nodes that are killed at moments drawn in advance, counted from the start of training."""

    def __init__(
        self, cluster: Nodes, run: RunDirectory, num_processes: int, training_s: float, forced: int, seed: int
    ) -> None:
        """
        Args:
            forced: deaths of a process, and of a node, in addition to those by chance.
        """
        self._cluster, self._run, self._num_processes = cluster, run, num_processes
        self._rng = random.Random(seed)
        self.killed_processes = self.killed_nodes = 0
        self.idle_lag_s = 0.0  # of an event loop without work, at the same time
        self._to_rejoin: list[tuple[float, int]] = []
        self._plan: list[tuple[float, Callable[[], None]]] = []
        for count, kill, offset in (
            (num_processes, self._kill_process, 0.3), (cluster.num_nodes, self._kill_node, 0.8)
        ):  # fmt: skip
            by_chance = _poisson_times(self._rng, count * DEATHS_PER_MINUTE / 60, training_s)
            planned = [(each + offset) / (forced + 1) * training_s for each in range(forced)]
            self._plan += [(at, kill) for at in (*by_chance, *planned)]
        self._plan.sort(key=lambda death: death[0])

    def follow(self, driver: "subprocess.Popen[bytes]") -> None:
        """Kill as planned until the driver ends."""
        began: float | None = None
        idle = _IdleLoop()
        while driver.poll() is None:
            time.sleep(0.1)
            if began is None and last_logged_step(self._run.metrics_path) > 0:
                began = time.monotonic()
                idle.lag.take()
            if began is not None and self._plan and time.monotonic() - began >= self._plan[0][0]:
                self._plan.pop(0)[1]()
            if self._to_rejoin and time.monotonic() >= self._to_rejoin[0][0]:
                self._cluster.rejoin(self._to_rejoin.pop(0)[1])

        self.idle_lag_s = idle.stop()

    def _kill_process(self) -> None:
        number = self._rng.randrange(self._num_processes)
        with contextlib.suppress(OSError, ValueError):  # it is being started again
            _, pid, start_time = (self._run.logs / f"process-{number}.pid").read_text().split()
            if process_at(int(pid)) == (int(pid), start_time):
                os.kill(int(pid), signal.SIGKILL)
                self.killed_processes += 1

    def _kill_node(self) -> None:
        index = self._rng.randrange(self._cluster.num_nodes)
        if self._cluster.is_up(index):
            self._cluster.lose(index)
            self.killed_nodes += 1
            self._to_rejoin.append((time.monotonic() + REJOIN_S, index))


class _IdleLoop:
    """An event loop without work in a thread: its delays are those that the machine's other programs cause."""

    def __init__(self) -> None:
        self.lag, self._loop = LoopLag(), asyncio.new_event_loop()
        self._loop.call_soon(self.lag.start)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def stop(self) -> float:
        """End the loop; return the 99th percentile of its delays."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        return self.lag.take().get("perf/loop_lag_s", 0.0)


def _poisson_times(rng: random.Random, per_s: float, until_s: float) -> list[float]:
    times = [rng.expovariate(per_s)]
    while times[-1] < until_s:
        times.append(times[-1] + rng.expovariate(per_s))
    return times[:-1]


def run_on_nodes(
    plan: Plan, num_nodes: int, num_processes: int, forced: int, seed: int, folder: Path
) -> tuple[Measured, Deaths]:
    """Run on a cluster of its own; return what was measured, and the deaths.

    Raises:
        RuntimeError: the run did not end by itself; `folder`/driver.log tells why.
    """
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    run = RunDirectory(folder / "run")
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    nodes = Nodes(num_nodes, {"PYTHONPATH": path})
    with contextlib.closing(nodes) as cluster:
        environment = {**os.environ, **cluster.environment, "PYTHONPATH": path}
        command = [sys.executable, str(DRIVER), str(folder / "plan.json"), str(run.path)]
        with (folder / "driver.log").open("wb") as log:
            driver = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deaths = Deaths(cluster, run, num_processes, plan.training_s, forced, seed)
            deaths.follow(driver)
        finally:
            if driver.poll() is None:
                driver.kill()
            driver.wait()
    if driver.returncode:
        words = (folder / "driver.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the driver ended with {driver.returncode}:\n{words}")
    measured = Measured(**json.loads((run.path / "measured.json").read_text()))
    return measured, deaths


def main() -> int:
    options = _parser().parse_args()
    per_process, left = divmod(options.engines, options.processes)
    if left or not per_process:
        _parser().error(f"--engines {options.engines} must be a multiple of --processes {options.processes}")
    groups = options.groups or options.engines
    per_node = ceil(options.engines / options.nodes)
    sizes = [
        f"generator.num_generators={options.engines}",
        f"generator.num_cpus={floor(1e4 / (1.1 * per_node)) / 1e4}",  # so that no node stays empty
        f"algorithm.prompts_per_step={groups}",
    ]
    plan = Plan(
        QUICKSTART, [*CHANGES, *sizes, *options.overrides], SPEEDS, options.length_mean, options.nodes,
        per_process, 60 * options.minutes, options.profile,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        measured, deaths = run_on_nodes(
            plan, options.nodes, options.processes, options.forced, options.seed, folder
        )
    for line in lines_of(measured, deaths):
        print(line)
    return 1 if measured.num_stale or measured.num_lost or measured.num_repeated else 0


def lines_of(measured: Measured, deaths: Deaths) -> Iterator[str]:
    """Yield the lines of the summary."""
    lags = sorted(measured.step_lags_s)
    yield f"start       nodes {measured.nodes_s:.1f} s, actors {measured.start_s:.1f} s"
    yield (
        f"training    {measured.num_steps} steps, {measured.num_groups} groups in {measured.training_s:.0f} s; "
        f"{measured.num_restarts} restarts, {measured.num_restores} restores, {measured.num_retried} groups "
        "sampled again"
    )
    yield f"killed      {deaths.killed_processes} processes, {deaths.killed_nodes} nodes"
    yield (
        f"loop lag    p99 {1000 * measured.loop_lag_s:.0f} ms; steps: median {1000 * median(lags):.0f}, "
        f"worst {1000 * lags[-1]:.0f}; a loop without work, at the same time: {1000 * deaths.idle_lag_s:.0f}"
    )
    yield (
        f"driver      {1000 * measured.driver_cpu_s / max(1, measured.num_groups):.1f} ms of CPU per group, "
        f"{measured.driver_cpu_s / measured.training_s:.0%} of a core; {measured.driver_bytes / 2**20:.0f} MiB"
    )
    sizes = measured.process_bytes
    yield f"processes   {len(sizes)} of engines, {sum(sizes) / 2**20:.0f} MiB, largest {max(sizes) / 2**20:.0f}"
    yield (
        f"faults      {measured.num_stale} groups too old, {measured.num_lost} prompts lost, "
        f"{measured.num_repeated} repeated"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--engines", type=positive, default=256, metavar="N", help="Generators (default: 256)")
    parser.add_argument("--processes", type=positive, default=32, metavar="N", help="they share (default: 32)")
    parser.add_argument("--nodes", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--groups", type=positive, metavar="N", help="per step (default: one per engine)")
    parser.add_argument("--length-mean", type=above_zero, default=300.0, metavar="TOKENS", help="default: 300")
    parser.add_argument("--minutes", type=above_zero, default=3.0, metavar="M", help="of training (default: 3)")
    parser.add_argument(
        "--forced", type=natural, default=3, metavar="N",
        help="deaths of a process, and of a node, besides 1%% of them per minute (default: 3)",
    )  # fmt: skip
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the deaths (default: 0)")
    parser.add_argument("--profile", metavar="FILE", help="write a profile of the event loop's thread")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the run's records in this folder")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the configuration")
    return parser


if __name__ == "__main__":
    sys.exit(main())
