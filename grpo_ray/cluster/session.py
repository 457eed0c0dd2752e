"""Ray: joining or starting a cluster, and holding what a run wants of it."""

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NoReturn

import ray
import torch
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_ray.cluster.environment import enable_token_auth, private_ray_folder, without_secrets
from grpo_ray.cluster.placement import Node, bundles_of, describe, reservations, shortfalls
from grpo_ray.cluster.reaper import dismiss, start_reaper
from grpo_ray.config import Config
from grpo_ray.config.placement import Strategy
from grpo_ray.config.secrets import HUB_ACCESS
from grpo_ray.errors import RunError


class ResourceError(RunError):
    """The cluster lacks what the configuration asks for."""


@contextlib.contextmanager
def connected(needs_hub: bool = False) -> Iterator[None]:
    """Within it, this process is a driver: of the cluster at RAY_ADDRESS, or of one on this machine alone.

    With `needs_hub` the actors of the latter inherit what fetching a model takes, such as HF_TOKEN.

    Raises:
        RunError: RAY_ADDRESS is a dashboard's address or Ray Client's, or nothing answers there.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address.startswith("http"):
        raise RunError(
            f"RAY_ADDRESS is {address}, where jobs are submitted; submit one with grpo-ray submit CONFIG, "
            "or unset RAY_ADDRESS to train on this machine alone"
        )
    if address.startswith("ray://"):
        raise RunError(
            f"RAY_ADDRESS is {address}, but a run is driven from a node of the cluster; submit it with "
            "grpo-ray submit CONFIG --address http://HOST:8265"
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
    """Refuse what this machine lacks for a run on it alone, before Ray is started.

    Raises:
        ResourceError: as `placed`.
    """
    if not os.environ.get("RAY_ADDRESS"):
        there = {"GPU": torch.cuda.device_count(), "CPU": os.cpu_count() or 1}
        _refuse(shortfalls(config, [Node("this machine", there)]), "this machine lacks resources")


NODES_MAY_COME = ". For nodes that are still coming, as an autoscaler's, set placement.wait_s"
GRACE_S = 10.0  # for what another job is just letting go of
RAY_STRATEGY: dict[Strategy, str] = {
    "pack": "PACK", "spread": "SPREAD", "strict_spread": "STRICT_SPREAD",
    "colocate": "STRICT_PACK",  # of the one bundle that there is then
}  # fmt: skip


class Placement:
    """The placement group of a run: what its actors reserve, held from before they start until the end."""

    def __init__(self, config: Config, group: PlacementGroup | None) -> None:
        """`group` has the bundles of `bundles_of(config)`; None where nobody reserves anything."""
        self._reservations, self._group = reservations(config), group
        self._index = {name: i for i, bundle in enumerate(bundles_of(config)) for name in bundle.actors}

    def options(self, actor: str) -> dict[str, Any]:
        """For `ActorClass.options`: what the actor reserves, and its bundle, also when it is started again."""
        wanted = self._reservations[actor]
        options: dict[str, Any] = {"num_gpus": wanted["GPU"], "num_cpus": wanted["CPU"]}
        if actor in self._index:
            bundle = PlacementGroupSchedulingStrategy(self._group, self._index[actor])
            options["scheduling_strategy"] = bundle
        return options


@contextlib.contextmanager
def placed(config: Config) -> Iterator[Placement]:
    """Hold the run's resources on the cluster's nodes; Ray lets go of them when this process dies.

    Raises:
        ResourceError: names each resource, how much is wanted by whom, and how much there is. At once, or
            after `placement.wait_s`.
    """
    wait_s = config.placement.wait_s
    if not wait_s:
        _refuse(shortfalls(config, _nodes()), "the cluster lacks resources", NODES_MAY_COME)
    bundles = [dict(bundle.resources) for bundle in bundles_of(config)]
    if not bundles:
        yield Placement(config, None)
        return
    group = placement_group(bundles, strategy=RAY_STRATEGY[config.placement.strategy])
    try:
        if not group.wait(wait_s or GRACE_S):
            _refuse_busy(config, wait_s)
        yield Placement(config, group)
    finally:
        remove_placement_group(group)


def _nodes(free: bool = False) -> list[Node]:
    """The cluster's living nodes, with what each has, or with what is free there."""
    left = available_resources_per_node() if free else {}
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(node["NodeManagerAddress"], left.get(node["NodeID"], {}) if free else node["Resources"])
        for node in alive
    ]


def _refuse_busy(config: Config, wait_s: float) -> NoReturn:
    """Ray has found no place: say what is lacking, or what is in use."""
    waited = f"after {wait_s:g} s (placement.wait_s) " if wait_s else ""
    _refuse(shortfalls(config, _nodes()), f"{waited}the cluster lacks resources")
    nodes = _nodes(free=True)
    lacking = shortfalls(config, nodes, "free") or ["what is free lies on several nodes"]
    raise ResourceError(
        f"{waited}the cluster is busy: {'; '.join(lacking)}. Free are {describe(nodes)}. Stop what uses it, or "
        "wait for it with placement.wait_s"
    )


def _refuse(lacking: Sequence[str], what: str, also: str = "") -> None:
    if lacking:
        raise ResourceError(
            f"{what}: {'; '.join(lacking)}. Run it on a larger cluster, or lower generator.num_generators or "
            f"num_gpus and num_cpus of generator, learner and scorer (0 GPUs runs on the CPU){also}"
        )
