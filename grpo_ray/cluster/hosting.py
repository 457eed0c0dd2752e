"""The actors of a run as Ray actors: the placement of each one, and its replacement."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.cluster import kinds
from grpo_ray.cluster.hosts import ServingHost, TrainingHost
from grpo_ray.cluster.kinds import NOTHING, Deferred, Kind
from grpo_ray.cluster.placement import LEARNER, joins_cluster, names_of
from grpo_ray.cluster.ray_internals import spilled_bytes_of
from grpo_ray.cluster.reaper import KILL_AFTER_S, Process, kill_if_left, send_signal
from grpo_ray.cluster.remote_actor import DEATHS, Client, as_actor, last_line, result_of
from grpo_ray.cluster.session import Placement, address_of_node
from grpo_ray.config import Config
from grpo_ray.config.secrets import values_of
from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.types import Ref, StartingModel
from grpo_ray.watch.memory import SpilledBytes
from grpo_ray.watch.ray_metrics import RayMetrics, are_on

T = TypeVar("T")


class ServingGroup(ServingHost):
    """The actors that sample and judge, as Ray actors."""

    def __init__(self, placement: Placement, *given: Any) -> None:
        """`given`: as for `ServingHost`."""
        self._placement = placement
        self._ending: list[Thread] = []  # each waits for the process of an actor that was killed
        self._spilled = SpilledBytes(lambda: [node for node in ray.nodes() if node["Alive"]], spilled_bytes_of)
        super().__init__(*given)

    async def fetch(self, reference: Ref[T]) -> T:
        """Bring the value of a reference into this process."""
        return await result_of("driver", reference)

    def put(self, data: T) -> Ref[T]:
        """Return a reference to `data`, which several actors can be given without a copy for each."""
        return cast("Ref[T]", ray.put(data))

    def spilled_bytes(self) -> int:
        """Return the bytes that object stores have written to disk, by their newest answers; waits for none."""
        return self._spilled.total()

    def dump_stacks(self) -> None:
        """Make every actor write its threads' Python stacks into its log, even if it is stuck.

        Actors without a process to be found are left out: this is a diagnosis, which must break nothing.
        """
        for name in self.by_name():
            self._reach(name, send_signal, send_signal)

    def _reach(self, name: str, here: Callable[[Process], object], there: Callable[[Process], object]) -> None:
        """Call `here` with the actor's process, or `there` on another node that it is on."""
        with contextlib.suppress(OSError, ValueError):  # no file; or an empty one, from a full disk
            node, pid, start_time = (self._run.logs / f"{name}.pid").read_text().split()
            process = int(pid), start_time
            if node == ray.get_runtime_context().get_node_id():
                here(process)
            else:  # on that node or nowhere: elsewhere the pid is another process's
                affinity = NodeAffinitySchedulingStrategy(node, soft=False)
                ray.remote(there).options(num_cpus=0, scheduling_strategy=affinity).remote(process)

    def _kill(self, name: str) -> None:
        """Kill an actor, and make sure of its process.

        Ray asks the process to end, and gives up if it cannot connect to it: one that is stopped would stay,
        with all its memory.
        """
        ray.kill(self.by_name()[name].handle)
        self._reach(name, self._kill_later, kill_if_left)

    def _kill_later(self, process: Process) -> None:
        self._ending.append(Thread(target=kill_if_left, args=(process,), daemon=True))
        self._ending[-1].start()

    def _place_of(self, name: str) -> str:
        """Return the address of an actor's node; empty if its process was not up yet."""
        with contextlib.suppress(OSError, IndexError):
            node = (self._run.logs / f"{name}.pid").read_text().split()[0]
            return next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node), "")
        return ""

    def stop(self, timeout_s: float = 20.0) -> None:
        """End the engines' own processes, then the actors; one that is not up yet is just killed.

        Ray also ends the child processes of an actor that is killed; asking first lets vLLM, and a worker with
        a temporary folder, clean up.
        """
        asked = (*self.generators, *self.teachers, *self.environments)
        clients = self.by_name()
        handles = [clients[name].handle for name in asked]
        with contextlib.suppress(Exception):  # one that is dead or hung is killed below all the same
            probes = {handle.take_stats.remote(): handle for handle in handles}
            up, _ = ray.wait(list(probes), num_returns=len(probes), timeout=0.5)
            ray.get([probes[probe].shutdown.remote() for probe in up], timeout=timeout_s)
        for name in clients:
            self._kill(name)
        for thread in self._ending:
            thread.join(2 * KILL_AFTER_S)

    def _start_environment(self, name: str) -> Client:
        settings = self._config.episodes
        given = name, self._config, self._model, settings.confined, values_of(settings.secrets)
        return self._start(kinds.ENVIRONMENT, name, given)

    def _start(
        self, kind: Kind, name: str, given: Sequence[Any], beside: Mapping[str, int] = NOTHING, *,
        is_with_driver: bool = False, **options: Any,
    ) -> Client:  # fmt: skip
        """Start an actor in its bundle, unless it is with the driver."""
        if is_with_driver:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            place: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": here}
        else:
            place = self._placement[name]
        calls = {"max_concurrency": 10_000} if kind.is_async else {}
        actor = as_actor(kind, name, self._run.logs, beside).options(**(calls | place | options))
        return Client(name, actor.remote(*given), next(self._numbers))


class ActorGroup(TrainingHost, ServingGroup):
    """Every actor of a run, as a Ray actor."""

    def __init__(self, *given: Any) -> None:
        """`given`: as for `ServingGroup`."""
        super().__init__(*given)
        self._metrics = RayMetrics(self._run.path.name) if are_on() else None

    def show_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export a step's metrics, for Ray's dashboard."""
        if self._metrics is not None:
            self._metrics.line(step, metrics)

    def show_phase(self, phase: str) -> None:
        """Export the run's current phase, for Ray's dashboard."""
        if self._metrics is not None:
            self._metrics.phase(phase)

    def _start_learner(self) -> Any:
        names, address = names_of(self._config)[LEARNER], Deferred(address_of_node, joins_cluster())
        if len(names) == 1:
            self.ranks = [self._start_rank(LEARNER, None, address)]
            return self.ranks[0]
        from grpo_ray.cluster.crew import Crew, seats_of  # they load torch

        self._store, seats = seats_of(self._config, address_of_node(joins_cluster()))
        self.ranks = [self._start_rank(n, seat, address) for n, seat in zip(names, seats, strict=True)]
        return Crew(LEARNER, self.ranks, self._place_of, self._config.learner.collective_timeout_s)


@contextlib.contextmanager
def learning(
    placement: Placement, config: Config, model: StartingModel, run_dir: Path
) -> Iterator[Callable[..., Any]]:
    """Start a Learner alone, and yield a function that calls its methods; end it however the block is left."""
    logs = RunDirectory(run_dir).logs
    actor = as_actor(kinds.LEARNER, LEARNER, logs).options(**placement[LEARNER])
    handle = actor.remote(model.path, config, model.end_token_ids)

    def call(method: str, *args: object) -> Any:
        try:
            return ray.get(getattr(handle, method).remote(*args))
        except DEATHS as error:
            raise RunError(
                f"the Learner ended: {last_line(error)}\nIts output is in {logs}/learner.log"
            ) from error

    try:
        yield call
    finally:
        ray.kill(handle)
