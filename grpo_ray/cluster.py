"""Ray: joining or starting a cluster, and whether it has what a run wants."""

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping

import ray
import torch

from grpo_ray.config import Config
from grpo_ray.environment import HUB_ACCESS, enable_token_auth, private_ray_folder, without_secrets
from grpo_ray.errors import RunError
from grpo_ray.reaper import dismiss, start_reaper


class ResourceError(RunError):
    """The cluster lacks what the configuration asks for."""


@contextlib.contextmanager
def connected(needs_hub: bool = False) -> Iterator[None]:
    """Within it, this process is a driver: of the cluster at RAY_ADDRESS, or of one on this machine alone.

    With `needs_hub` the actors of the latter inherit what fetching a model takes, such as HF_TOKEN.

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
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of calls that were given up with their actor
    with _own_cluster(HUB_ACCESS if needs_hub else ()) if address == "local" else _cluster_at(address):
        try:
            yield
        finally:
            ray.shutdown()


# Each actor writes to the run's logs/ (see remote_actor), so Ray need not forward its output.
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextlib.contextmanager
def _cluster_at(address: str) -> Iterator[None]:
    try:
        ray.init(address=address, **QUIET)
    except ConnectionError as error:
        raise RunError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from error
    yield


@contextlib.contextmanager
def _own_cluster(secrets_kept: Collection[str]) -> Iterator[None]:
    """A Ray of this user's and this run's alone, which ends with this process however that ends."""
    enable_token_auth()
    folder = private_ray_folder()
    with without_secrets(keep=secrets_kept):
        ray.init(address="local", include_dashboard=False, _temp_dir=folder, **QUIET)
    reaper = start_reaper()
    try:
        yield
    finally:
        dismiss(reaper)


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
        ("GPU", config.gpus_per_generator, config.gpus_of_learner, 0),
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
