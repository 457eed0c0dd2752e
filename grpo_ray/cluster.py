"""Ray: connecting, checking resources, wrapping the actor classes, placing and naming them."""

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.actors.generator import Generator
from grpo_ray.actors.learner import Learner
from grpo_ray.actors.scorer import Scorer
from grpo_ray.actors.trajectory_buffer import TrajectoryBuffer
from grpo_ray.actors.weight_sync import WeightSync
from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.errors import RunError
from grpo_ray.preflight import Prepared
from grpo_ray.telemetry.run_files import RunDirectory


class ResourceError(RunError):
    """The cluster lacks what the configuration asks for."""


@dataclass(frozen=True)
class Actors:
    """The handles of one run; Generators by name."""

    generators: dict[str, Any]
    scorer: Any
    buffer: Any
    learner: Any
    weight_sync: Any

    def by_name(self) -> dict[str, Any]:
        others = {name: getattr(self, name) for name in ("scorer", "buffer", "learner", "weight_sync")}
        return {**self.generators, **others}


def connect() -> None:
    """Join the cluster at RAY_ADDRESS, or start one on this machine alone.

    Raises:
        RunError: RAY_ADDRESS is a dashboard's address, or nothing answers there.
    """
    address = os.environ.get("RAY_ADDRESS", "local")
    if address.startswith("http"):
        raise RunError(
            f"RAY_ADDRESS is {address}, where jobs are submitted; submit one with launch/ray_job.sh CONFIG, "
            "or unset RAY_ADDRESS to train on this machine alone"
        )
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; else it warns
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        # Each actor writes to the run's logs/ (see _host), so Ray need not forward its output.
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **options)
    except ConnectionError as error:
        raise RunError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error


def check_machine(config: Config) -> None:
    """`check_resources` for a run on this machine alone, before Ray is started.

    Raises:
        ResourceError: as `check_resources`.
    """
    if "RAY_ADDRESS" not in os.environ:
        _compare(config, {"GPU": torch.cuda.device_count(), "CPU": os.cpu_count() or 1}, "this machine")


def check_resources(config: Config) -> None:
    """Refuse at once what Ray would wait for without end.

    Raises:
        ResourceError: names each resource, how much is wanted by whom, and how much there is.
    """
    _compare(config, ray.cluster_resources(), "the cluster")
    most = max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
    if config.generator.num_gpus > most:
        raise ResourceError(
            f"generator.num_gpus: {config.generator.num_gpus} GPUs for each Generator must be on one machine; "
            f"the largest of the cluster has {most:g}"
        )


def _compare(config: Config, available: Mapping[str, float], place: str) -> None:
    generator, learner = config.generator, config.learner
    shortfalls = []
    for resource, per_generator, per_learner, others in (
        ("GPU", generator.num_gpus, learner.num_gpus, 0),
        ("CPU", generator.num_cpus, learner.num_cpus, config.scorer.num_cpus),
    ):
        wanted = generator.num_generators * per_generator + per_learner + others
        if wanted > available.get(resource, 0):
            shortfalls.append(
                f"{resource}: {wanted:g} wanted "
                f"({generator.num_generators} x {per_generator:g} for Generators, "
                f"{per_learner:g} for the Learner, {others:g} for the Scorer), "
                f"{available.get(resource, 0):g} there"
            )
    if shortfalls:
        raise ResourceError(
            f"{place} lacks resources: " + "; ".join(shortfalls) + ". Run it on a larger cluster, or lower "
            "generator.num_generators, generator.num_gpus or learner.num_gpus (0 GPUs runs on the CPU)"
        )


def start_actors(config: Config, prepared: Prepared, run_dir: Path) -> Actors:
    """Create every actor of a run. They come up at the same time; each has a `ready` method to await."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    run = RunDirectory(run_dir)
    logs, rollouts = run.logs, run.rollouts if config.run.save_rollouts else None
    algorithm, sync = config.algorithm, config.weight_sync

    def generator(index: int) -> tuple[str, Any]:
        name = f"generator-{index}"
        handle = _host(Generator, name, logs).options(
            num_gpus=config.generator.num_gpus, num_cpus=config.generator.num_cpus, max_concurrency=10_000
        )
        engine = _Deferred(lambda: make_engine(config, prepared.model_path, prepared.max_model_len, index))
        return name, handle.remote(name, engine, config.generator.slowdown_s)

    generators = dict(generator(index) for index in range(config.generator.num_generators))
    learner = _host(Learner, "learner", logs).options(
        num_gpus=config.learner.num_gpus, num_cpus=config.learner.num_cpus
    ).remote(prepared.model_path, config, prepared.end_token_ids)  # fmt: skip
    scorer = _host(Scorer, "scorer", logs).options(
        num_cpus=config.scorer.num_cpus,
        allow_out_of_order_execution=True,  # a slow group holds no other
    )
    # The buffer writes the run's rollouts, so it lives where the run directory is.
    buffer = _host(TrajectoryBuffer, "buffer", logs).options(
        num_cpus=0, max_concurrency=10_000, scheduling_strategy=here
    )
    weight_sync = _host(WeightSync, "weight_sync", logs).options(num_cpus=0, max_concurrency=100)
    clients = [_Client(name, handle) for name, handle in generators.items()]
    return Actors(
        generators=generators,
        scorer=scorer.remote(config.task.reward, algorithm, config.scorer),
        buffer=buffer.remote(algorithm.prompts_per_step, rollouts),
        learner=learner,
        weight_sync=weight_sync.remote(clients, sync.max_lag, algorithm.prompts_per_step, sync.phase_timeout_s),
    )


def stop_actors(actors: Actors, timeout_s: float = 20.0) -> None:
    """End the engines' own processes, then the actors; a Generator that is not up yet is just killed.

    Killing an actor ends its child processes too (Ray sees to it); asking first lets vLLM clean up.
    """
    generators = list(actors.generators.values())
    up, _ = ray.wait([g.take_stats.remote() for g in generators], num_returns=len(generators), timeout=0.5)
    if len(up) == len(generators):
        with contextlib.suppress(Exception):  # one that is dead or hung is killed below all the same
            ray.get([g.shutdown.remote() for g in generators], timeout=timeout_s)
    for handle in actors.by_name().values():
        ray.kill(handle)


class _Deferred:
    """An argument that is built in the actor's process (an engine cannot be sent there)."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build


def _host(cls: Any, name: str, logs: Path) -> Any:
    """`cls` as a Ray actor class, its output (and its child processes') in `logs/<name>.log`."""

    def __init__(self: Any, *args: Any) -> None:
        _redirect_output(logs / f"{name}.log")
        built = [argument.build() if isinstance(argument, _Deferred) else argument for argument in args]
        cls.__init__(self, *built)

    hosted = type(cls.__name__, (cls,), {"__init__": __init__, "__module__": cls.__module__})
    return ray.remote(hosted)


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


class _Client:
    """An actor handle that a class without Ray can call: methods return something to await."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return getattr(self._handle, method).remote
