"""The actors of a simulated run, as objects of this process that are called like Ray actors."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from grpo_ray.cluster.local import LocalActors, LocalClient
from grpo_ray.config import Config
from grpo_ray.core.generator import Generator as GeneratorActor
from grpo_ray.records.checkpoint import Checkpoint
from grpo_ray.tools.simulation.engine import SimulatedEngine
from grpo_ray.tools.simulation.environments import SimulatedEnvironmentWorker
from grpo_ray.tools.simulation.speeds import Lengths, Speeds
from grpo_ray.tools.simulation.workers import Account, SimulatedLearner, SimulatedScorer, SimulatedTeacher
from grpo_ray.types import StartingModel

Trace = Callable[[str], object]


class SimulatedClient(LocalClient):
    """A client of an asynchronous actor that traces and meters its calls."""

    def __init__(self, name: str, build: Callable[[], Any], number: int, host: "SimulatedActors") -> None:
        actor = build()  # now, so that no metered call builds it
        super().__init__(name, lambda: actor, number)
        self._host, self._meter = host, host.meter

    def die(self, reason: str = "it was ended") -> None:
        self._note("died")
        super().die(reason)

    def _call(self, method: str, args: Sequence[Any]) -> Any:
        self._note(method)
        if self._meter is None:
            return super()._call(method, args)
        begun = self._meter.begin()
        try:
            return super()._call(method, args)
        finally:
            self._meter.end("client", begun)

    async def _work(self, method: str, args: Sequence[Any]) -> Any:
        work = super()._work(method, args)
        return await (work if self._meter is None else self._meter.metered("client", work))

    async def _serve(self, method: str, args: Sequence[Any]) -> Any:
        work = super()._serve(method, args)
        return await (work if self._meter is None else self._meter.metered(self.name, work))

    def _note(self, what: str) -> None:
        if self._host.trace is not None:
            self._host.trace(f"{asyncio.get_running_loop().time():.6f} {self.name} {what}\n")


class SimulatedActors(LocalActors):
    """The actors of a simulated run: real ones, but for those that would compute."""

    def __init__(
        self, config: Config, start: StartingModel, run_dir: Path, checkpoint: Checkpoint | None, *,
        speeds: Speeds, lengths: Lengths, account: Account, trace: Trace | None = None,
        meter: Any = None,
    ) -> None:  # fmt: skip
        """Start the actors; `trace` receives a line per call and per death."""
        self._speeds, self._lengths, self._account = speeds, lengths, account
        self.trace, self.meter = trace, meter
        super().__init__(config, start, run_dir, checkpoint)

    def _client(self, name: str, build: Callable[[], Any], beside: Collection[str] = ()) -> SimulatedClient:
        return SimulatedClient(name, build, next(self._numbers), self)

    def _start_generator(self, name: str) -> SimulatedClient:
        seed = self._seed_of(name)
        recompute_kv, max_num_seqs = self._config.weight_sync.recompute_kv, self._config.generator.max_num_seqs
        engine = SimulatedEngine(self._speeds, self._lengths, max_num_seqs, seed, recompute_kv)
        if self.meter is not None:
            engine.on_timer = self.meter.timer(name, engine.on_timer)
        slowdown_s = self._config.generator.slowdown_s
        return self._client(name, lambda: GeneratorActor(name, engine, slowdown_s, self._version))

    def _start_scorer(self, name: str) -> SimulatedClient:
        return self._client(name, lambda: SimulatedScorer(self._config, self._speeds))

    def _start_teacher(self, name: str) -> SimulatedClient:
        return self._client(name, lambda: SimulatedTeacher(self._speeds))

    def _start_environment(self, name: str) -> SimulatedClient:
        worker = SimulatedEnvironmentWorker(name, self._config, self._speeds, self._num_starts[name])
        self._num_starts[name] += 1
        client = self._client(name, lambda: worker)
        worker.on_death = client.die
        return client

    def _start_rank(self, name: str, *_: Any) -> SimulatedClient:
        learner = SimulatedLearner(self._config, self._speeds, self._account, self._version)
        return self._client(name, lambda: learner)

    def _end_grader(self, scorer: LocalClient) -> None:
        """Do nothing: simulated graders have no processes."""
