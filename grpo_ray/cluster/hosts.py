"""The base of the two hosts of a run's actors: Ray (hosting.py), and this process (local.py)."""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from grpo_ray.cluster.placement import environment_names, generator_names, scorer_names, teacher_names
from grpo_ray.config import Config
from grpo_ray.config.reward import secrets_in
from grpo_ray.config.secrets import values_of
from grpo_ray.engines import engine_seed
from grpo_ray.records.checkpoint import Checkpoint
from grpo_ray.records.run_files import RunDirectory
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
        self.generators: dict[str, Any] = {n: self._start_generator(n) for n in generator_names(config)}
        self.scorers: dict[str, Any] = {n: self._start_scorer(n) for n in scorer_names(config)}
        self.teachers: dict[str, Any] = {n: self._start_teacher(n) for n in teacher_names(config)}
        self.environments: dict[str, Any] = {n: self._start_environment(n) for n in environment_names(config)}

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
        kinds = (
            (self.generators, self._start_generator),
            (self.scorers, self._start_scorer),
            (self.teachers, self._start_teacher),
            (self.environments, self._start_environment),
        )
        clients, start = next(kind for kind in kinds if name in kind[0])
        clients[name] = start(name)
        return clients[name]

    def _seed_of(self, name: str) -> int:
        """Return the seed of an engine that is about to start."""
        seed = engine_seed(self._config.run.seed, name, self._version, self._num_starts[name])
        self._num_starts[name] += 1
        return seed

    @property
    def _training_path(self) -> Path | None:
        return self._checkpoint.training_path if self._checkpoint else None

    @property
    def _buffer_arguments(self) -> tuple[Config, Path | None, Path | None]:
        """The TrajectoryBuffer's: it writes the run's rollouts into the run directory."""
        return self._config, self._run.rollouts if self._config.run.save_rollouts else None, self._training_path

    @property
    def _learner_arguments(self) -> tuple[Any, ...]:
        """Those of the Learner, and of each of its ranks."""
        model, run = self._model, self._run
        ends, path = model.end_token_ids, self._training_path
        return model.path, self._config, ends, path, run.skipped, self._initial_path, run.profile

    @property
    def _scorer_arguments(self) -> tuple[Config, dict[str, str]]:
        """Those of each Scorer, with the secrets of this process's environment."""
        return self._config, values_of(secrets_in(self._config.rewards.values()))

    @abstractmethod
    def _kill(self, name: str) -> None:
        """End an actor that is to be replaced."""

    @abstractmethod
    def _start_generator(self, name: str) -> Any: ...

    @abstractmethod
    def _start_scorer(self, name: str) -> Any: ...

    @abstractmethod
    def _start_teacher(self, name: str) -> Any: ...

    @abstractmethod
    def _start_environment(self, name: str) -> Any: ...
