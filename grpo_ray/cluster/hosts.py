"""The base of the two hosts of a run's actors: Ray (hosting.py), and this process (local.py)."""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from grpo_ray.cluster import kinds
from grpo_ray.cluster.kinds import NOTHING, Deferred, Kind
from grpo_ray.cluster.placement import LEARNER, SCORER, names_of
from grpo_ray.config import Config
from grpo_ray.config.reward import secrets_in
from grpo_ray.config.secrets import values_of
from grpo_ray.engines import engine_seed, make_engine, make_teacher_engine
from grpo_ray.records.checkpoint import Checkpoint
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.transfer.wires import Wires
from grpo_ray.types import StartingModel


class ServingHost(ABC):
    """Generators, Scorers, Teachers and EnvironmentWorkers: all that sample and judge, started together.

    They end with a `with` block of the host, however that is left.
    """

    def __init__(
        self, config: Config, model: StartingModel, run_dir: Path, checkpoint: Checkpoint | None = None
    ) -> None:
        """
        Args:
            model: the one that the run began with; a checkpoint's weights replace it, or its adapter is added.
        """
        self._config, self._run, self._checkpoint = config, RunDirectory(run_dir), checkpoint
        self._initial_path, self._model = model.path, model
        if checkpoint is not None and config.model.adapter is None:
            self._model = replace(model, path=str(checkpoint.path))
        self._version = checkpoint.state.step if checkpoint else 0
        self._num_starts: Counter[str] = Counter()  # of engines, by their Generator's name
        self._numbers = itertools.count()  # of processes
        names = names_of(config)
        self.generators: dict[str, Any] = {n: self._start_generator(n) for n in names["generator"]}
        self.scorers: dict[str, Any] = {n: self._start_scorer(n) for n in names[SCORER]}
        self.teachers: dict[str, Any] = {n: self._start_teacher(n) for n in names["teacher"]}
        self.environments: dict[str, Any] = {n: self._start_environment(n) for n in names["environment"]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def stop(self) -> None:
        """End all actors, and what they started."""

    def by_name(self) -> dict[str, Any]:
        return {**self.generators, **self.scorers, **self.teachers, **self.environments}

    def restart(self, name: str) -> Any:
        """Start a fresh actor in place of `name`; a Generator has the weights that the actors started with."""
        self._kill(name)
        started = (
            (self.generators, self._start_generator),
            (self.scorers, self._start_scorer),
            (self.teachers, self._start_teacher),
            (self.environments, self._start_environment),
        )
        clients, start = next(kind for kind in started if name in kind[0])
        clients[name] = start(name)
        return clients[name]

    def _seed_of(self, name: str) -> int:
        """Return the seed of an engine that is about to start."""
        seed = engine_seed(self._config.run.seed, name, self._version, self._num_starts[name])
        self._num_starts[name] += 1
        return seed

    @abstractmethod
    def _kill(self, name: str) -> None:
        """End an actor that is to be replaced."""

    @abstractmethod
    def _start(
        self, kind: Kind, name: str, given: Sequence[Any], beside: Mapping[str, int] = NOTHING, *,
        is_with_driver: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        """Start an actor, and return its client.

        Args:
            given: its arguments.
            beside: methods that run in parallel with its others, and the number of threads that each has.
            is_with_driver: it reserves nothing, and lives and dies with the driver's node.
            options: those of a Ray actor.
        """

    def _start_generator(self, name: str) -> Any:
        config, model = self._config, self._model
        engine = Deferred(make_engine, config, model.path, model.max_model_len, self._seed_of(name))
        return self._start(kinds.GENERATOR, name, (name, engine, config.generator.slowdown_s, self._version))

    def _start_scorer(self, name: str) -> Any:
        config, secrets = self._config, values_of(secrets_in(self._config.rewards.values()))
        return self._start(
            kinds.SCORER, name, (config, secrets), {"take_stats": 1},
            max_concurrency=config.scorer.num_workers,  # groups at a time, so each worker has an answer
            allow_out_of_order_execution=True,  # a slow group delays no other
        )  # fmt: skip

    def _start_teacher(self, name: str) -> Any:
        engine = Deferred(make_teacher_engine, self._config, self._model)
        return self._start(kinds.TEACHER, name, (name, engine))

    def _start_environment(self, name: str) -> Any:
        return self._start(kinds.ENVIRONMENT, name, (name, self._config, self._model))


class TrainingHost(ServingHost):
    """Every actor of a run."""

    def __init__(self, *given: Any) -> None:
        """`given`: as for the host of those that sample and judge."""
        super().__init__(*given)
        self.learner: Any = self._start_learner()
        self.buffer: Any = self._start_buffer()
        self.weight_sync: Any = self._start_weight_sync()

    def by_name(self) -> dict[str, Any]:
        others = (*self.ranks, self.buffer, self.weight_sync)
        return {**super().by_name(), **{client.name: client for client in others}}

    def _start_learner(self) -> Any:
        self.ranks = [self._start_rank(LEARNER)]
        return self.ranks[0]

    def _start_rank(self, name: str, *place: Any) -> Any:
        """Start the Learner, or one of its ranks; `place`: its seat and its node's address, on Ray."""
        model, run = self._model, self._run
        given = (
            model.path, self._config, model.end_token_ids, self._training_path, run.skipped, self._initial_path,
            run.profile, *place,
        )  # fmt: skip
        return self._start(kinds.LEARNER, name, given, self._beside_training())

    def _beside_training(self) -> dict[str, int]:
        """Return the Learner's methods that run beside its training, and their numbers of threads."""
        alone = ["write_captured", "take_stats", "work_done"]
        if not self._config.weight_sync.wire_backend:
            return dict.fromkeys(alone, 1)
        each = 8 * self._config.generator.num_generators  # some may still wait for predecessors
        short = dict.fromkeys([*alone, "open_wire", "drop_wire", "release"], 1)
        return {**short, "join_wire": each, "send": each}

    def _start_buffer(self) -> Any:
        """Start the buffer beside the driver, because it writes the run's rollouts into the run directory."""
        rollouts = self._run.rollouts if self._config.run.save_rollouts else None
        given = self._config, rollouts, self._training_path
        return self._start(kinds.BUFFER, "buffer", given, is_with_driver=True)

    def _start_weight_sync(self) -> Any:
        """Start WeightSync beside the driver: another node's death would take the run back to a checkpoint."""
        generators, sync = list(self.generators.values()), self._config.weight_sync
        receiving = "switch" if sync.wire_backend == "nccl" else "stage"
        wires = Wires(self.ranks[0], receiving) if sync.wire_backend else None
        given = generators, sync.phase_timeout_s, self._version, wires
        return self._start(kinds.WEIGHT_SYNC, "weight_sync", given, is_with_driver=True)

    @property
    def _training_path(self) -> Path | None:
        return self._checkpoint.training_path if self._checkpoint else None
